#!/usr/bin/env python3
"""Chat templates through the server and the commands: forms of messages that clients send, the files a template may
come from, --chat-template in every command that renders. What a template gives is compared with Jinja2 itself (set up
as transformers does), the ids of raw prompts with the library `tokenizers`. The models are millet-7m with other
templates. Prints "ok NAME" or "FAIL NAME" for each test."""
import json
import os
import shutil
import subprocess
import sys
import tempfile

try:
    import jinja2
    import openai
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from tokenizers import Tokenizer
    import test_serve
    from test_serve import CHAT, COMP, MODEL, TARE, Server, run
except ImportError as why:
    print(f"skip test_chat: {why}")
    sys.exit(0)

FOLDER = tempfile.TemporaryDirectory()
CHATML = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
          "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
CALLS = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }}"
         "{% for k, v in c.function.arguments|items %} {{ k }}={{ v }}{% endfor %}>{% endfor %}{% endfor %}")
PRINTS = ("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% for c in m.tool_calls or [] %}<{{ c.function.name }} "
          "{{ c.function.arguments }}>{% endfor %}{% endfor %}")
LOOPS = ("{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}({{ p.text }})"
         "{% endfor %}{% endif %};{% endfor %}")
SCHEMA = ("{% for t in tools %}{% for k, v in t.function.parameters.properties.items() %}{{ k }}:{{ v.type }} {% endfor %}"
          "{% if 'items' in t.function.parameters.properties %}{{ t.function.parameters.properties['items'] }}{% endif %}{{ t.function.parameters.properties.keys()|list }}"
          "{{ t | tojson }}{% endfor %}")
REFUSES = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate: '"
           " ~ m.role) }}{% endif %}{{ m.content }}{% endfor %}")
LINES = "\n  {%- if true %}\n    a\n  {% endif %}\n  {# note #}\nb{%+ if true +%}\n c\n  {%- endif -%}  \n d\r\n{% for m in messages %}\n  {{ m.content }}\n{% endfor %}\n\n\n"


def model(name, config=None, tokenizer=None, **files):
    """A folder like millet-7m's with other text files; None as content leaves a file out."""
    path = os.path.join(FOLDER.name, name)
    os.makedirs(path)
    for f in os.listdir(MODEL):
        if f not in ("tokenizer_config.json", "eval") and f not in files:
            os.symlink(os.path.abspath(os.path.join(MODEL, f)), os.path.join(path, f))
    base = json.load(open(os.path.join(MODEL, "tokenizer_config.json")))
    base.pop("chat_template")
    json.dump({**base, **(config or {})}, open(os.path.join(path, "tokenizer_config.json"), "w"))
    if tokenizer:
        os.unlink(os.path.join(path, "tokenizer.json"))
        json.dump(tokenizer, open(os.path.join(path, "tokenizer.json"), "w"))
    for f, text in files.items():
        f = f.replace("__", "/").replace("_jinja", ".jinja").replace("_json", ".json")
        os.makedirs(os.path.dirname(os.path.join(path, f)), exist_ok=True)
        with open(os.path.join(path, f), "w", newline="") as out:
            out.write(text)
    return path


def template_file(text):
    path = os.path.join(FOLDER.name, "t%d.jinja" % len(os.listdir(FOLDER.name)))
    with open(path, "w", newline="") as out:
        out.write(text)
    return path


class Served:
    """A server of a model, or of millet-7m with a template."""

    def __init__(self, template=None, path=None, *args):
        test_serve.MODEL = path or MODEL
        self.s = Server(*(("--chat-template", template_file(template)) if template else ()), *args)
        test_serve.MODEL = MODEL

    def __enter__(self):
        return self

    def __exit__(self, *why):
        code = self.s.stop()
        assert why[0] or code == 0, code

    def text(self, messages, **more):
        """What the template makes of a request, by way of its ids."""
        code, j, _ = self.s.post("/tokenize", {"messages": messages, "add_generation_prompt": False, **more})
        assert code == 200, j
        return self.s.post("/detokenize", {"tokens": j["tokens"]})[1]["prompt"]

    def refused(self, messages, *words, **more):
        for path in ("/tokenize", CHAT):
            code, j, _ = self.s.post(path, {"messages": messages, **more})
            assert code == 400, (code, j)
            assert j["error"]["type"] and all(w in j["error"]["message"] for w in words), j
        assert self.s.post(COMP, {"prompt": "x", "max_tokens": 1})[0] == 200


def by_jinja(text, **context):
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    env.filters["tojson"] = lambda x, **kw: json.dumps(x, ensure_ascii=False, **kw)
    return env.from_string(text).render(**context)


def call(content=..., arguments='{"city": "Paris", "n": 1.0}'):
    turn = {"role": "assistant", "content": content,
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}]}
    if content is ...:
        del turn["content"]
    return [{"role": "user", "content": "q"}, turn, {"role": "tool", "tool_call_id": "1", "content": "3"}]


def test_arguments_as_text_or_object():
    with Served(CALLS) as s:
        assert s.text(call("")) == "[user]q[assistant]<f city=Paris n=1.0>[tool]3", s.text(call(""))
        assert s.text(call("", {"b": 1, "a": 2})).count("<f b=1 a=2>") == 1
        assert "<f>" in s.text(call("", ""))
        s.refused(call("", '{"city":'), "messages[1].tool_calls[0]", "JSON")
        s.refused(call("", "[1]"), "messages[1].tool_calls[0]", "JSON object")
    with Served(PRINTS) as s:
        assert s.text(call("", '{"b": 1,"a":2}')) == '[user]q[assistant]<f {"b": 1,"a":2}>[tool]3'


def test_keys_named_like_methods():
    props = {"items": {"type": "array"}, "keys": {"type": "string"}, "get": {"type": "integer"}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": props}}}]
    with Served(SCHEMA) as s:
        messages = [{"role": "user", "content": "x"}]
        assert s.text(messages, tools=tools) == by_jinja(SCHEMA, tools=tools)


def test_content_null_missing_or_empty():
    for text in (CALLS, PRINTS):
        with Served(text) as s:
            all_three = [s.text(call(c)) for c in (None, ..., "")]
            assert len(set(all_three)) == 1 and "None" not in all_three[0] and all_three[0].endswith("[tool]3")


def test_content_of_parts():
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": " you"}]
    ask = lambda content: [{"role": "user", "content": content}]
    with Served(CHATML) as s:
        assert s.text(ask(parts)) == s.text(ask("Hi you")) == "<|im_start|>user\nHi you<|im_end|>\n"
        assert s.text(ask([])) == s.text(ask(""))
        s.refused(ask([{"type": "image_url", "image_url": {"url": "data:"}}]), "image_url")
        s.refused(ask([{"type": "text"}]), "text")
    with Served(LOOPS.replace("({{ p.text }})", "{{ p.text }}")) as s:
        assert s.text(ask(parts)) == "Hi you;"


def test_white_space_of_blocks():
    messages = [{"role": "user", "content": "x"}]
    with Served(LINES) as s:
        assert s.text(messages) == by_jinja(LINES, messages=messages), s.text(messages)


def test_roles_and_refusals():
    with Served(CHATML.replace("<|im_start|>{{ m.role }}", "{% if m.role == 'system' %}S{% elif m.role == 'user' %}U{% endif %}")) as s:
        assert s.text([{"role": "developer", "content": "x"}]).startswith("Sx")
    with Served(REFUSES) as s:
        twice = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
        s.refused(twice, "Roles must alternate: user")
        try:
            s.s.client().chat.completions.create(model=MODEL, messages=twice)
            assert False
        except openai.BadRequestError as e:
            assert "Roles must alternate" in e.message
            assert not e.response.headers.get("retry-after") and e.response.headers.get("x-should-retry") != "true"
        assert s.text(twice[:1]) == "a"


def test_bos_once():
    tok = json.load(open(os.path.join(MODEL, "tokenizer.json")))
    tok["post_processor"] = {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}},
                             {"Sequence": {"id": "A", "type_id": 0}}], "pair": [{"Sequence": {"id": "A", "type_id": 0}},
                             {"Sequence": {"id": "B", "type_id": 1}}],
                             "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}}
    tok["post_processor"]["special_tokens"]["<|endoftext|>"]["ids"] = [next(a["id"] for a in tok["added_tokens"] if a["content"] == "<|endoftext|>")]
    bos = tok["post_processor"]["special_tokens"]["<|endoftext|>"]["ids"][0]
    path = model("bos", {"chat_template": "{{ bos_token }}" + CHATML}, tok)
    ref = Tokenizer.from_file(os.path.join(path, "tokenizer.json"))
    with Served(None, path) as s:
        ids = s.s.post("/tokenize", {"messages": [{"role": "user", "content": "Hi"}]})[1]["tokens"]
        assert ids.count(bos) == 1 and ids[0] == bos, ids
        for text in ("<|endoftext|>Hi", "Hi"):
            for special in (True, False):
                got = s.s.post("/tokenize", {"prompt": text, "add_special_tokens": special})[1]["tokens"]
                assert got == ref.encode(text, add_special_tokens=special).ids, got
        usage = s.s.post(COMP, {"prompt": "<|endoftext|>Hi", "max_tokens": 1})[1]["usage"]["prompt_tokens"]
        assert usage == len(ref.encode("<|endoftext|>Hi").ids)
    with Served("{{ bos_token }}<|im_end|>" + CHATML) as s:  # two tokens before the first turn, both wanted
        assert s.text([{"role": "user", "content": "x"}]).startswith("<|endoftext|><|im_end|><|im_start|>")


def test_depth():
    with Served(SCHEMA) as s:
        deep = '{"properties":' * 1000 + "1" + "}" * 1000
        body = ('{"messages":[{"role":"user","content":"x"}],"tools":[%s]}' % deep).encode()
        code, j, _ = s.s.post(CHAT, body, raw=True)
        assert code == 400 and "200" in j["error"]["message"], j
        nested = {"type": "string"}
        for _ in range(150):
            nested = {"type": "object", "properties": nested}
        tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
        assert s.text([{"role": "user", "content": "x"}], tools=[tool]) == by_jinja(SCHEMA, tools=[tool])
        code, j, _ = s.s.post(CHAT, {"messages": [7] * 12000})
        assert code == 400 and "messages[0]" in j["error"]["message"]
        assert s.s.post(COMP, {"prompt": "x", "max_tokens": 1})[0] == 200
    with Served("{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}") as s:
        s.refused([{"role": "user", "content": "x"}], "limit of 600")


def test_continue_and_prompt():
    with Served(CHATML) as s:
        turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "two  "}]
        assert s.text(turns, continue_final_message=True) == "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\ntwo  "
        assert s.text(turns[:1], add_generation_prompt=True).endswith("<|im_start|>assistant\n")
        s.refused(turns, "exclude", continue_final_message=True, add_generation_prompt=True)
        s.refused([*turns, {"role": "assistant", "content": ""}], "text in the last message", continue_final_message=True)
    with Served(CHATML.replace("m.content }}", "m.content | trim }}")) as s:
        assert s.text(turns, continue_final_message=True).endswith("assistant\ntwo")


def test_numbers_and_documents():
    text = "{{ n }} {{ f }} {{ big }} {{ documents | map(attribute='title') | join(',') }} {{ d | tojson }}"
    with Served(text) as s:
        got = s.text([{"role": "user", "content": "x"}], documents=[{"title": "A", "text": "x"}, {"title": "B", "text": "y"}],
                     chat_template_kwargs={"n": 9007199254740993, "f": 1.0, "big": 10**25, "d": {"z": 1, "a": 2.0, "10": None}})
        assert got == '9007199254740993 1.0 10000000000000000000000000 A,B {"z": 1, "a": 2.0, "10": null}', got


def test_where_templates_come_from():
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    rows = [("config", {"chat_template": "C"}, {}, "C", "C"),
            ("named", {"chat_template": named}, {}, "D", "T"),
            ("mapping", {"chat_template": {"tool_use": "T", "default": "D"}}, {}, "D", "T"),
            ("file", {"chat_template": "C"}, {"chat_template_jinja": "J"}, "J", "J"),
            ("file_and_more", {"chat_template": named}, {"chat_template_jinja": "J", "additional_chat_templates__tool_use_jinja": "X"}, "J", "X"),
            ("json_last", {"chat_template": "C"}, {"chat_template_json": '{"chat_template": "P"}'}, "C", "C"),
            ("json_only", {}, {"chat_template_json": '{"chat_template": "P"}'}, "P", "P"),
            ("file_hides_names", {"chat_template": named}, {"chat_template_jinja": "J"}, "J", "J")]
    turns, tools = [{"role": "user", "content": "x"}], [{"type": "function", "function": {"name": "f"}}]
    for name, config, files, plain, with_tools in rows:
        with Served(None, model(name, config, **files)) as s:
            assert (s.text(turns), s.text(turns, tools=tools)) == (plain, with_tools), name
            assert s.text(turns, tools=tools, tool_choice="none") == plain
            shown = json.loads(s.s.get("/tokenizer_info"))["chat_template"]
            assert shown == (plain if plain == with_tools else [{"name": "default", "template": plain},
                                                                {"name": "tool_use", "template": with_tools}]), shown
    path = model("no_default", {"chat_template": [{"name": "rag", "template": "R"}, {"name": "tool_use", "template": "T"}]})
    with Served(None, path) as s:
        assert s.text(turns, tools=tools) == "T"
        s.refused(turns, "none is named default", "--chat-template")
    with Served(None, model("none")) as s:
        assert json.loads(s.s.get("/tokenizer_info"))["chat_template"] is None
        s.refused(turns, "--chat-template")
    with Served("O", path) as s:
        assert s.text(turns) == s.text(turns, tools=tools) == "O"


def test_option_in_every_command():
    """A template that refuses everything shows who renders it."""
    raises = template_file("{{ raise_exception('seen ' ~ messages[-1].role) }}")
    task = os.path.join(FOLDER.name, "task.jsonl")
    with open(task, "w") as f:
        f.write(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    rows = [["run", MODEL, "-p", "x", "--max-tokens", "1"],
            ["eval", MODEL, "--task", task, "--max-tokens", "1"],
            ["compare", MODEL, MODEL, "--task", task, "--max-tokens", "1"]]
    for row in rows:
        r = subprocess.run([TARE, *row, "--chat-template", raises], capture_output=True, text=True, timeout=120)
        assert r.returncode == 1 and "seen user" in r.stderr, (row, r.returncode, r.stderr[-400:])
        r = subprocess.run([TARE, *row, "--chat-template", "/nonexistent"], capture_output=True, text=True, timeout=120)
        assert r.returncode != 0 and "/nonexistent" in r.stderr, (row, r.stderr[-400:])
        broken = template_file("a\n{% if %}")
        r = subprocess.run([TARE, *row, "--chat-template", broken], capture_output=True, text=True, timeout=120)
        assert r.returncode != 0 and "line 2" in r.stderr and broken in r.stderr, (row, r.stderr[-400:])
    r = subprocess.run([TARE, "run", MODEL, "-p", "x", "--max-tokens", "1", "--raw", "--chat-template", raises], capture_output=True, text=True)
    assert r.returncode == 0, r.stderr


def main():
    only = sys.argv[1:]
    good = True
    for name, test in list(globals().items()):
        if name.startswith("test_") and callable(test) and (not only or name in only):
            good &= run(test)
    shutil.rmtree(FOLDER.name, ignore_errors=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
