"""The chat page in a headless Chromium: `page.py URL KEY`, with the package selenium and Debian's chromium and
chromium-driver."""

import json
import shutil
import sys
import urllib.request

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

# How long the browser may take for a step before it is taken for broken.
PATIENCE = 120


def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    # Root has no sandbox, and containers have little shared memory. The page is our own.
    for flag in ["--headless", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,800"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    return webdriver.Chrome(options, webdriver.ChromeService(shutil.which("chromedriver")))


class Page:
    def __init__(self, driver, url):
        self.driver = driver
        driver.get(url + "/")

    def find(self, css):
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def text(self, css):
        return self.find(css).text

    def until(self, what, condition):
        return WebDriverWait(self.driver, PATIENCE, 0.02).until(lambda _: condition(), what)

    def number(self, css):
        return float(self.text(css).split()[0])

    def picture(self):
        return self.driver.execute_script("return document.getElementById('plot').toDataURL()")

    def answer(self):
        """The newest turn: its text, and the line below."""
        box = self.driver.find_elements(By.CSS_SELECTOR, ".turn")[-1]
        assert "assistant" in box.get_attribute("class")
        return [box.find_element(By.CSS_SELECTOR, part).text for part in ("p", ".quiet")]

    def send(self, message, tokens):
        field = self.find("#tokens")
        field.clear()
        field.send_keys(str(tokens))
        self.find("#message").send_keys(message)
        self.find("#send").click()


def test_a_key_is_asked_for(page, key):
    page.until("a word about the key", lambda: "API key" in page.text("#state"))
    page.find("#key").send_keys(key)
    page.until("the model's name", lambda: page.text("#model"))
    page.until("no error any more", lambda: not page.text("#state"))
    assert page.number("#running") == 0


def test_every_control_has_a_name(page, _):
    controls = page.driver.find_elements(By.CSS_SELECTOR, "input, textarea, button, canvas, [role=log]")
    assert len(controls) > 8
    for control in controls:
        assert control.accessible_name, control.get_attribute("outerHTML")


def test_the_batch_is_plotted(page, key):
    before, picture = page.number("#generated"), page.picture()
    # A request that ends by its length only.
    call = {"prompt": "On and on", "max_tokens": 3000, "stream": True, "ignore_eos": True}
    headers = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
    url = page.driver.current_url + "v1/completions"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(call).encode(), headers)):
        page.until("a request in the batch", lambda: page.number("#running") == 1)
        page.until("tokens per second", lambda: page.number("#rate") > 0)
        assert page.number("#generated") > before and page.picture() != picture
    page.until("an empty batch", lambda: page.number("#running") == 0)


def test_an_answer_is_streamed(page, _):
    page.send("Tell me a story about a candle.", 200)
    texts = set()

    def ended():
        text, note = page.answer()
        texts.add(text)
        return "tokens/s" in note

    page.until("an answer", ended)
    assert len(texts - {""}) > 2, "the answer did not come in pieces"


def test_an_answer_is_stopped(page, _):
    page.send("Write a very long story about the sea.", 3000)
    page.until("the beginning of an answer", lambda: page.answer()[0])
    page.find("#stop").click()
    page.until("a word about the stop", lambda: "stopped" in page.answer()[1])
    page.until("no page in use", lambda: page.text("#pages").startswith("0 of "))
    assert page.find("#send").is_enabled() and not page.find("#stop").is_enabled()


def test_an_error_is_shown(page, _):
    page.send("Too much", 10**6)
    page.until("an error", lambda: "max_tokens is 1000000" in page.answer()[1])
    page.find("#clear").click()
    assert not page.driver.find_elements(By.CSS_SELECTOR, ".turn")


def test_colours_follow_the_system(page, _):
    grounds = []
    for scheme in ["light", "dark"]:
        media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        grounds.append(page.find("body").value_of_css_property("background-color"))
    assert grounds[0] != grounds[1], grounds


def test_nothing_comes_from_elsewhere(page, _):
    script = "return performance.getEntriesByType('resource').map((entry) => entry.name)"
    names = page.driver.execute_script(script)
    root = page.driver.current_url
    assert names and all(name.startswith(root) for name in names), names
    # Refusals by status are logged as well: of the key, and of too much.
    log = page.driver.get_log("browser")
    wrong = [entry["message"] for entry in log if entry["level"] == "SEVERE"]
    wrong = [message for message in wrong if " status of 401 " not in message and " status of 400 " not in message]
    assert not wrong, wrong


def main(url, key):
    with browser() as driver:
        page = Page(driver, url)
        for name, test in list(globals().items()):
            if name.startswith("test_"):
                test(page, key)
                print("page:", name.removeprefix("test_").replace("_", " "), flush=True)


main(*sys.argv[1:])
