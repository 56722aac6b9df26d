#!/usr/bin/env python3
"""candle-fused-serve beside llama.cpp's server: the same file, threads, requests and client, over HTTP, in turns.

    ./serve.py --fused ../../target/release/candle-fused-serve --llama llama-server --model SmolLM2-135M-Instruct.Q4_0.gguf

Each side is started for a round, warmed up, measured with every number of clients, and stopped; the sides take turns, and
begin with another one each round. A client sends one request after the other to /v1/completions, streaming, greedy, with
`ignore_eos`: prompts are token ids, of one length and never alike, so that no server can read one from its cache.
README.md says more. Needs Python 3.9 and nothing else.
"""

import argparse
import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import threading
import time


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--fused", required=True, help="the program candle-fused-serve")
    parser.add_argument("--llama", required=True, help="the program llama-server")
    parser.add_argument("--model", required=True, help="a GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--slots", type=int, default=8, help="requests that run together")
    parser.add_argument("--clients", default="1,8", help="clients at once, several with commas")
    parser.add_argument("--requests", type=int, default=2, help="requests of each client")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", help="a file for all figures, JSON")
    return parser.parse_args()


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A side's process."""

    def __init__(self, side, args):
        self.port = free_port()
        room = args.prompt + args.tokens + 16
        common = ["--model", args.model, "--port", str(self.port)]
        if side == "candle-fused":
            command = [args.fused, *common, "--cpu", "--threads", str(args.threads)]
            command += ["--sequences", str(args.slots), "--positions", str(room), "--no-prefix-cache"]
        else:
            command = [args.llama, *common, "--threads", str(args.threads), "--threads-batch", str(args.threads)]
            command += ["--parallel", str(args.slots), "--ctx-size", str(args.slots * room), "--no-cache-prompt"]
            command += ["--cache-ram", "0", "--flash-attn", "on" if side.endswith("fa") else "off"]
        log = subprocess.DEVNULL if not os.environ.get("SERVE_LOG") else None
        self.process = subprocess.Popen(command, stdout=log, stderr=log)
        for _ in range(600):
            if self.process.poll() is not None:
                sys.exit(f"{side} ended with {self.process.returncode}; SERVE_LOG=1 shows what it says")
            try:
                connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            except OSError:
                pass
            time.sleep(0.1)
        self.stop()
        sys.exit(f"{side} did not come up")

    def stop(self):
        self.process.terminate()
        self.process.wait(60)


def complete(port, ids, tokens):
    """Seconds to the first token and to the last."""
    body = {
        "prompt": ids,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        sys.exit(f"status {answer.status}: {answer.read()}")
    first, usage = None, None
    for line in answer:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        if first is None:
            first = time.monotonic() - start
        if b'"usage"' in line:
            usage = json.loads(line[6:]).get("usage") or usage
    if usage and usage["completion_tokens"] != tokens:
        sys.exit(f"{usage['completion_tokens']} tokens, expected {tokens}")
    if not usage:
        sys.exit("the stream has no usage")
    return first, time.monotonic() - start


def measure(port, args, clients, seed):
    """Tokens a second of all clients together, and the median time to a first token."""
    draw = random.Random(seed)
    prompts = [
        [[draw.randrange(1000, 40000) for _ in range(args.prompt)] for _ in range(args.requests)]
        for _ in range(clients)
    ]
    firsts, failed = [], []

    def client(own):
        try:
            for ids in own:
                firsts.append(complete(port, ids, args.tokens)[0])
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=client, args=(own,)) for own in prompts]
    start = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    taken = time.monotonic() - start
    if failed:
        sys.exit(str(failed[0]))
    return clients * args.requests * args.tokens / taken, statistics.median(firsts)


def main():
    args = arguments()
    sides = ["candle-fused", "llama.cpp", "llama.cpp fa"]
    counts = [int(n) for n in args.clients.split(",")]
    figures = {side: {n: [] for n in counts} for side in sides}
    for r in range(args.rounds):
        for i in range(len(sides)):
            side = sides[(i + r) % len(sides)]
            server = Server(side, args)
            try:
                measure(server.port, args, 1, -1)
                for n in counts:
                    figures[side][n].append(measure(server.port, args, n, 1000 * r + n))
            finally:
                server.stop()
            last = ", ".join(f"{n} clients {figures[side][n][-1][0]:.1f} tok/s" for n in counts)
            print(f"round {r + 1}: {side}: {last}", file=sys.stderr, flush=True)
    print(f"prompts of {args.prompt} tokens, answers of {args.tokens}, medians of {args.rounds} rounds\n")
    print("| | " + " | ".join(f"{n} clients, tokens/s | first token" for n in counts) + " |")
    print("|---|" + "---|---|" * len(counts))
    for side in sides:
        cells = []
        for n in counts:
            rates, firsts = zip(*figures[side][n])
            cells += [f"{statistics.median(rates):.1f}", f"{statistics.median(firsts) * 1e3:.0f} ms"]
        print(f"| {side} | " + " | ".join(cells) + " |")
    if args.out:
        with open(args.out, "w") as out:
            json.dump({"arguments": vars(args), "figures": figures}, out, indent=1)


if __name__ == "__main__":
    main()
