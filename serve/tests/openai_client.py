"""What the official client of OpenAI's API makes of the server: `openai_client.py URL KEY`, with the package openai.
The server has SmolLM2, runs 4 requests at once and lets 4 wait."""

import asyncio
import json
import math
import sys
import urllib.request

import openai

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# Ends by its length only.
ENDLESS = {"max_tokens": 3000, "temperature": 0, "extra_body": {"ignore_eos": True}}


class Clients:
    def __init__(self, url, key):
        self.url, self.key = url, key
        self.client = self.with_key(key)
        self.model = self.client.models.list().data[0].id

    def with_key(self, key):
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0)

    def metric(self, name):
        headers = {"Authorization": "Bearer " + self.key}
        request = urllib.request.Request(self.url + "/metrics", headers=headers)
        with urllib.request.urlopen(request) as response:
            lines = response.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(f"candle_fused_{name} "))

    def until_idle(self):
        while self.metric("requests_running") or self.metric("pages") != self.metric("pages_free"):
            pass

    def chat(self, messages=QUESTION, **options):
        return self.client.chat.completions.create(model=self.model, messages=messages, **options)

    def completion(self, prompt, **options):
        return self.client.completions.create(model=self.model, prompt=prompt, **options)


def test_models(clients):
    models = clients.client.models
    assert [model.id for model in models.list()] == [clients.model]
    assert models.retrieve(clients.model).object == "model"
    refused(openai.NotFoundError, "model_not_found", lambda: models.retrieve("other"))


def test_completion(clients):
    answer = clients.completion("The capital of France is", max_tokens=8, temperature=0)
    assert answer.object == "text_completion" and answer.model == clients.model
    assert "Paris" in answer.choices[0].text, answer
    assert answer.usage.completion_tokens == 8 and answer.choices[0].finish_reason == "length"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 8
    pair = clients.completion(["The capital of France is", "Two and two are"], max_tokens=4, temperature=0)
    assert [choice.index for choice in pair.choices] == [0, 1]


def test_chat(clients):
    answer = clients.chat(temperature=0, max_tokens=40)
    message = answer.choices[0].message
    assert message.role == "assistant" and "Paris" in message.content, answer
    assert answer.choices[0].finish_reason == "stop"
    assert 0 < answer.usage.completion_tokens < 40 and answer.usage.prompt_tokens > 0


def test_stream(clients):
    whole = clients.chat(temperature=0, max_tokens=40).choices[0].message.content
    chunks = list(clients.chat(temperature=0, max_tokens=40, stream=True, stream_options={"include_usage": True}))
    usage = chunks.pop().usage
    assert chunks[0].choices[0].delta.role == "assistant"
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
    assert "".join(pieces) == whole and sum(map(bool, pieces)) > 1, pieces
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert usage.completion_tokens > 1 and usage.prompt_tokens > 1
    texts = [chunk.choices[0].text for chunk in clients.completion("One, two,", max_tokens=12, stream=True)]
    assert "".join(texts)


def test_stop(clients):
    answer = clients.completion("1, 2, 3, 4, 5,", max_tokens=60, temperature=0, stop=["8", "nine"])
    assert answer.choices[0].finish_reason == "stop", answer
    assert "7" in answer.choices[0].text and "8" not in answer.choices[0].text, answer


def test_n_and_seed(clients):
    options = {"n": 3, "seed": 7, "temperature": 1.5, "max_tokens": 30}
    # Once before, so that both times the prompt is in the cache.
    clients.chat(max_tokens=1)
    first, again = (clients.chat(**options) for _ in range(2))
    texts = [choice.message.content for choice in first.choices]
    assert len(set(texts)) == 3, texts
    assert texts == [choice.message.content for choice in again.choices]
    options["seed"] = 1000
    other = clients.chat(**options)
    assert texts != [choice.message.content for choice in other.choices]


def test_many_at_once(clients):
    async def ask():
        async with openai.AsyncOpenAI(base_url=clients.url + "/v1", api_key=clients.key, max_retries=0) as client:
            calls = (
                client.completions.create(model=clients.model, prompt="Count:" + " 1" * i, max_tokens=5 + i)
                for i in range(8)
            )
            return await asyncio.gather(*calls)

    for i, answer in enumerate(asyncio.run(ask())):
        assert answer.usage.completion_tokens <= 5 + i


def test_logprobs(clients):
    answer = clients.chat(temperature=0, max_tokens=40, logprobs=True, top_logprobs=4)
    content = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in content) == answer.choices[0].message.content, answer
    for entry in content:
        assert len(entry.top_logprobs) == 4 and entry.top_logprobs[0].token == entry.token, entry
        assert sum(math.exp(top.logprob) for top in entry.top_logprobs) <= 1.001, entry
        assert bytes(entry.bytes).decode() == entry.token
    chunks = clients.chat(temperature=0, max_tokens=40, logprobs=True, stream=True)
    lists = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    assert [entry.token for entries in lists for entry in entries] == [entry.token for entry in content]
    answer = clients.completion("The capital of France is", max_tokens=8, temperature=0, logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert "".join(logprobs.tokens) == answer.choices[0].text, answer
    assert len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == len(logprobs.text_offset) == 8
    assert all(max(top.values()) == own for top, own in zip(logprobs.top_logprobs, logprobs.token_logprobs))


def test_min_p(clients):
    greedy = clients.completion("The capital of France is", max_tokens=8, temperature=0)
    narrow = clients.completion("The capital of France is", max_tokens=8, temperature=2, extra_body={"min_p": 1})
    assert greedy.choices[0].text == narrow.choices[0].text


def test_json(clients):
    schema = {
        "type": "object",
        "properties": {
            "capital": {"type": "string", "maxLength": 30},
            "continent": {"enum": ["Africa", "America", "Asia", "Australia", "Europe"]},
            "islands": {"type": "integer", "minimum": 0, "maximum": 9},
        },
        "required": ["capital", "continent", "islands"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "country", "schema": schema, "strict": True}}
    options = {"max_tokens": 120, "response_format": form}
    answer = clients.chat(temperature=0, **options)
    country = json.loads(answer.choices[0].message.content)
    assert "Paris" in country["capital"] and set(country) == set(schema["properties"]), country
    assert answer.choices[0].finish_reason == "stop"
    for choice in clients.chat(temperature=1.3, n=3, **options).choices:
        country = json.loads(choice.message.content)
        assert country["continent"] in schema["properties"]["continent"]["enum"], country
        assert 0 <= country["islands"] <= 9, country
    chunks = clients.chat(temperature=0, stream=True, **options)
    assert json.loads("".join(chunk.choices[0].delta.content or "" for chunk in chunks))["capital"]
    question = [{"role": "user", "content": "Describe a cat as a JSON object with a name and an age."}]
    answer = clients.chat(question, temperature=0, max_tokens=150, response_format={"type": "json_object"})
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict), answer
    assert answer.choices[0].message.content.startswith("{"), answer


def refused(kind, code, call):
    try:
        call()
    except openai.APIStatusError as error:
        assert type(error) is kind, repr(error)
        assert error.code == code and error.message, repr(error)
        return error
    raise AssertionError(f"expected {kind.__name__}")


def test_errors(clients):
    for param, code, options in [
        ("max_tokens", None, {"max_tokens": -1}),
        ("max_tokens", "context_length_exceeded", {"max_tokens": 10**6}),
        ("temperature", None, {"temperature": 3}),
        ("n", None, {"n": 0}),
        ("stop", None, {"stop": ""}),
        ("top_logprobs", None, {"logprobs": True, "top_logprobs": 21}),
        ("min_p", None, {"extra_body": {"min_p": 2}}),
        ("response_format", None, {"response_format": {"type": "xml"}}),
        ("tools", "unsupported_parameter", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ]:
        error = refused(openai.BadRequestError, code, lambda: clients.chat(**options))
        assert error.param == param, repr(error)
    long = [{"role": "user", "content": "word " * 10_000}]
    error = refused(openai.BadRequestError, "context_length_exceeded", lambda: clients.chat(long))
    assert error.param == "messages"
    create = clients.client.completions.create
    refused(openai.NotFoundError, "model_not_found", lambda: create(model="other", prompt="a"))
    stranger = clients.with_key("wrong")
    refused(openai.AuthenticationError, "invalid_api_key", stranger.models.list)


def test_a_full_queue(clients):
    streams = [clients.completion("On and on", n=4, stream=True, **ENDLESS) for _ in range(2)]
    for stream in streams[:1]:
        next(iter(stream))
    error = refused(openai.RateLimitError, "queue_full", lambda: clients.completion("a"))
    assert error.response.headers["retry-after"]
    for stream in streams:
        stream.close()
    clients.until_idle()


def test_a_stream_that_is_closed_frees_its_pages(clients):
    with clients.chat(stream=True, **ENDLESS) as stream:
        next(iter(stream))
        while not clients.metric("requests_running"):
            pass
    clients.until_idle()


def main(url, key):
    clients = Clients(url, key)
    for name, test in list(globals().items()):
        if name.startswith("test_"):
            test(clients)
            print("openai:", name.removeprefix("test_").replace("_", " "), flush=True)


main(*sys.argv[1:])
