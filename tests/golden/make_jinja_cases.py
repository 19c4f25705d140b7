#!/usr/bin/env python3
"""Writes tests/fixtures/chat-templates/cases.jsonl: small templates and what Jinja2 makes of them,
set up as transformers does it. Run: python3 tests/golden/make_jinja_cases.py (needs jinja2)."""
import json
import pathlib

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

CONTEXT = {
    "s": "Hello, World", "u": "  Grüße 中文 🙂  ", "n": 7, "neg": -7, "big": 1234567890123, "f": 2.5,
    "t": True, "no": False, "nil": None, "empty": [], "l": [3, 1, 2], "w": ["b", "A", "c", "a"],
    "d": {"a": 1, "b": {"c": [1, 2]}, "items": "shadow"}, "html": "<a href='x'>&\"</a>",
    "people": [{"name": "Ann", "age": 31, "tags": ["x"]}, {"name": "bob", "age": 25},
               {"name": "Cy", "age": 31, "ok": True}],
    "lines": "one\n  two\n\nthree", "tree": [{"v": 1, "kids": [{"v": 2, "kids": []}]}, {"v": 3, "kids": []}],
}

EXPRESSIONS = r"""
1 + 2 * 3 ** 2 - 4 / 2
7 // 2, -7 // 2, 7 % 3, -7 % 3, 7 % -3, 2 ** -1
7.5 // 2, -7.5 % 2, 1e3, 1.5e-7, 1e16, 123456789.123, 0.1 + 0.2, 1e22, 5e-324, 100.0
1_000 + 0x1f + 0b11 + 0o17
-n | abs, (-n) ** 2, -2 ** 2, 2 ** 3 ** 2
not t or no and nil
1 < 2 < 3, 1 < 3 < 2, 1 == 1.0, t == 1, 'a' < 'b', 'a' 'b'
'ell' in s, 'x' not in s, 3 in l, 'a' in d, 9 not in l
s ~ n ~ nil ~ t ~ f ~ missing
s if no else 'other'
s if no
(1,), (), (1, 2), [1, 'a', nil, 2.0], {'k': [t, no], 2: 'x'}
"it's", 'say "x"', ["it's", 'say "x"', "both ' and \""]
['\n\t\\', 'é中🙂', '\x01\u200b\u00a0']
'\x41\u00e9\n\q'
s[0], s[-1], s[1:4], s[::-1], s[-3:], u[3:5], u[::2], s[100:], s[5:2], s[99]
l[0], l[-1], l[1:], l[::-1], l[5], l[::2], l[-2:], l[2:0:-1]
d.a, d['a'], d.b.c[1], d.missing, d['b']['c'], d.items is callable, d['items']
d.get('a'), d.get('zz'), d.get('zz', 5), d.keys() | list, d.values() | list, d.b.items() | list
s.upper(), s.lower(), s.title(), s.capitalize(), s.swapcase(), "o'neil x-y".title()
u.strip(), u.lstrip(), u.rstrip(), 'xxaxx'.strip('x'), 'abc'.lstrip('ba'), 'abc'.rstrip('cz')
s.split(', '), 'a b  c '.split(), 'a,b,c'.split(',', 1), 'a,b,c'.rsplit(',', 1), ' a b c'.split(none, 1), ''.split(), ''.split(',')
' a b c '.rsplit(none, 1), ' a b c '.split(none, 1), ' a b c '.rsplit(none, 5), ' a b '.rsplit(none, 0), ' a b '.split(none, 0), 'a'.split('a')
lines.splitlines(), lines.splitlines(true), 'a\r\nb\n'.splitlines()
s.startswith('He'), s.endswith('ld'), s.startswith(('x', 'H')), s.find('o'), s.rfind('o'), s.find('zz'), s.index('W'), u.find('中')
s.replace('l', 'L'), s.replace('l', 'L', 1), 'ab'.replace('', '-'), s.count('l'), ''.join(w), '-'.join(['a', 'b'])
'12'.isdigit(), 'ab1'.isalnum(), 'ab'.isalpha(), ' '.isspace(), 'AB'.isupper(), 'ab'.islower(), ''.isdigit()
'a'.ljust(3) ~ '|', 'a'.rjust(3), 'a'.center(4) ~ '|', '-5'.zfill(4), 'ab'.center(5, '*')
'a.b.c'.partition('.'), 'a.b.c'.rpartition('.'), 'abc'.partition('x'), 'abc'.removeprefix('a'), 'abc'.removesuffix('bc')
'{} and {}'.format(1, 'x'), '{1}{0}'.format('a', 'b'), '{x}'.format(x=3), '{{}}'.format()
'%s is %d and %.2f' % ('a', 3, 2.5), '%5s|%-5s|' % ('a', 'b'), '%%' % (), '%x' % 255, '%r' % 'q'
s | upper, s | lower, s | title, s | capitalize, s | length, s | trim, u | trim, s | reverse, s | first, s | last, 'xax' | trim('x')
l | sort, l | sort(reverse=true), w | sort, w | sort(case_sensitive=true), l | sum, l | min, l | max, l | first, l | last, l | length, l | reverse | list
w | unique | list, [1, 1.0, 2, true] | unique | list, w | join, w | join(', '), people | join(', ', attribute='name')
people | map(attribute='name') | list, w | map('upper') | list, people | map(attribute='ok', default='-') | list
people | selectattr('age', 'equalto', 31) | map(attribute='name') | join(' '), people | rejectattr('ok', 'defined') | list | length, people | selectattr('ok') | list | length
l | select('odd') | list, l | reject('gt', 1) | list, [0, '', none, 1] | select | list, l | select('in', [1, 2]) | list
people | sort(attribute='age') | map(attribute='name') | list, people | sum(attribute='age'), people | max(attribute='age'), people[:1] | map(attribute='tags.0') | list
people | groupby('age') | map('first') | list
d.b | tojson, people | tojson, s | tojson, html | tojson, nil | tojson, 1.0 | tojson, u | tojson, '\x01\x7f"\\\n' | tojson
people | tojson(indent=2)
d | tojson(indent=4), {} | tojson(indent=2), [] | tojson(indent=2), [[], {}] | tojson(indent=1)
{'b': 1, 'a': 2} | tojson(sort_keys=true), l | tojson(separators=(',', ':')), 'é🙂' | tojson(ensure_ascii=true), {1: 2, none: 3, true: 4} | tojson
missing | default('x'), nil | default('x'), '' | default('x', true), nil | d('y', boolean=true)
'42' | int, '4.9' | int, 'x' | int, 'x' | int(7), 3.9 | int, '2.5' | float, 'x' | float, 'ff' | int(base=16), nil | int
2.5 | round, 3.5 | round, 2.567 | round(2), 2.1 | round(method='ceil'), 2.9 | round(0, 'floor'), 7 | round, -7.5 | abs
l | string, nil | string, t | string, 5 | string | length
lines | indent, lines | indent(2, true), lines | indent(2, blank=true), lines | indent('> ')
html | e, html | escape | length, ('a'|safe) + '<', ('<' | e) ~ '<'
d | dictsort | map('first') | list, {'b': 1, 'A': 2} | dictsort, {'b': 1, 'a': 2} | dictsort(by='value'), d | items | list | length
l | batch(2) | list, l | batch(2, 'x') | list, [1,2,3,4,5] | slice(2) | list, [1,2,3,4,5] | slice(3, 0) | list
s | replace('o', '0'), s | replace('o', '0', 1), 'a b' | urlencode, s | wordcount, 'x' | center(5) ~ '|', '%s-%s' | format(1, 2)
range(3) | list, range(2, 8, 3) | list, range(3, 0, -1) | list, range(0) | list
s is string, n is number, n is integer, f is float, t is boolean, t is integer, t is number, nil is none, d is mapping, l is sequence, s is sequence, d is iterable, missing is defined, missing is undefined, s is defined
n is odd, n is even, n is divisibleby 7, n is divisibleby(2), n is eq 7, n is ne(7), n is lt 8, n is ge 7, s is in ['x', s], t is true, no is false, n is not none, s is lower, 'a' is lower, range is callable
t is sameas true, n is equalto 7 and s is string, not n is none, missing is sequence, missing is string, nil is mapping
missing, missing or 'or', missing == missing, missing in l, missing | length, missing | list, missing | upper
dict(a=1, b=2), dict(a=1) | length, namespace(a=1).a, namespace(x=5)['x']
[1, 2] + [3], [0] * 3, 'ab' * 2, (1, 2) + (3,), 2 * 'x', 'x' * -1
[1, [2, 3]] == [1, [2, 3]], {'a': 1} == {'a': 1.0}, (1,) == [1], '1' == 1, [1, 2] < [1, 3]
l.index(1), l.count(3), l[n - 6], l[true]
(w | map('upper')) is iterable, (l | select('odd')) and 'true', d.b['c'] | last
1 if t else 2 if no else 3, (1 if no else 2) + 1
big * 1000, 2 ** 62, 10 / 4, 10 / 5, 7 // 2.0
strftime_now('%Y-%m-%d') , strftime_now('%d %b %Y')
""".strip().split("\n")

ERRORS = r"""
{{ 1 / 0 }}
{{ 'a' + 1 }}
{{ missing.x }}
{{ missing + 1 }}
{{ nil.x.y }}
{{ nil | tojson | nosuch }}
{{ s is nosuch }}
{{ l.append(1) }}
{{ d.update({}) }}
{{ (l | select('odd')) | length }}
{{ (l | select('odd')) | tojson }}
{{ missing | tojson }}
{{ 'x' < 1 }}
{{ raise_exception('no ' ~ s) }}
{{ s( }}
{{ s
{% if t %}
{% for %}
{% endfor %}
{{ {'a' }}
{{ 'abc }}
{# never closed
{% nosuch %}
{{ range(200000) | length }}
{% for a, b in l %}{% endfor %}
{% set d.a = 1 %}
{{ n() }}
{{ nil[0].x }}
{{ l | join(attribute='x.y') }}
{% macro m(a) %}{% endmacro %}{{ m(1, 2) }}
{% macro m(a) %}{% endmacro %}{{ m(b=1) }}
{% for x in n %}{% endfor %}
{{ n | length }}
{% break %}
{{ missing() }}
{% set x %}
{{ -s }}
{{ ) }}
{{ }}
{{ a b }}
{{ [][0].x }}
{% macro r(n) %}{{ r(n + 1) }}{% endmacro %}{{ r(0) }}
""".strip().split("\n")

BLOCKS = [
    "a\n  {% if t %}\n    b\n  {% endif %}\nc\n",
    "a\n  {%- if t -%}\n    b\n  {%- endif -%}\nc\n\n\n",
    "a\n  {%+ if t +%}\n    b\n  {%+ endif %}\nc",
    "x {% if t %} y {% endif %} z\n",
    "a\r\n{% if t %}\r\nb\r\n{% endif %}\r\nc\r\n",
    "  {# comment #}\nx{# c #}\ny {#- c -#} z\n{#+ c +#}\n",
    "{% raw %}\n{{ x }} {% if %}\n  {% endraw %}\ny",
    "{%- raw -%}  {{ x }}  {%- endraw -%}  y",
    "  {{ s }}\n  {{- s -}}  \n!",
    "{% for x in l %}{{ loop.index }}{{ loop.index0 }}{{ loop.revindex }}{{ loop.revindex0 }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.previtem }}{{ loop.nextitem }};{% endfor %}",
    "{% for x in empty %}x{% else %}none{% endfor %}{% for x in missing %}x{% else %}none{% endfor %}",
    "{% for x in l if x > 1 %}{{ loop.index }}:{{ x }}/{{ loop.length }} {% endfor %}",
    "{% for k, v in d.b.items() %}{{ k }}={{ v }}{% endfor %}{% for c in 'héy' %}[{{ c }}]{% endfor %}",
    "{% for k in d %}{{ k }},{% endfor %}{% for (a, b) in [(1, 2), (3, 4)] %}{{ a + b }} {% endfor %}",
    "{% for x in tree recursive %}{{ loop.depth }}{{ x.v }}({{ loop(x.kids) }}){% endfor %}",
    "{% for x in l %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% if x == 2 %}{% break %}{% endif %}{% endfor %}",
    "{% for x in l %}{{ loop.cycle('a', 'b') }}{{ loop.changed(x > 1) }} {% endfor %}",
    "{% set x = 1 %}{% for y in l %}{% set x = x + 1 %}{{ x }}{% endfor %}{{ x }}",
    "{% set ns = namespace(x=1) %}{% for y in l %}{% set ns.x = ns.x + y %}{% endfor %}{{ ns.x }}",
    "{% if no %}a{% elif n == 7 %}b{% else %}c{% endif %}{% if no %}a{% elif nil %}b{% else %}c{% endif %}",
    "{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set (c, d2) = l[:2] %}{{ c }}{{ d2 }}",
    "{% set x %}  block {{ n }}{% endset %}[{{ x }}]{% set y | upper | trim %} up {% endset %}[{{ y }}]",
    "{% set x = 1 %}{% if t %}{% set x = 2 %}{% endif %}{{ x }}",
    "{% macro m(a, b=2, c='x') %}{{ a }}-{{ b }}-{{ c }};{% endmacro %}{{ m(1) }}{{ m(1, c=3) }}{{ m(b=5, a=4) }}{{ m() }}",
    "{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, 2, k=3) }}",
    "{% macro w(x) %}<{{ caller(x) }}>{% endmacro %}{% call(y) w(5) %}got {{ y }}{% endcall %}",
    "{% macro w() %}<{{ caller() }}>{% endmacro %}{% call w() %}in{% endcall %}{% macro z() %}{{ caller is defined }}{% endmacro %}{{ z() }}",
    "{% macro f(n) %}{{ n }}{% if n > 0 %},{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(4) }}",
    "{% set g = 5 %}{% macro m() %}{{ g }}{% endmacro %}{{ m() }}{% set g = 6 %}{{ m() }}",
    "{% filter upper %}abc {{ s }}{% endfilter %}{% filter trim | replace('a', 'b') %} aa {% endfilter %}|",
    "{% with a = 1, b = 2 %}{{ a + b }}{% endwith %}{{ a is defined }}",
    "{% generation %}g {{ n }}{% endgeneration %}!",
    "{{ 'a' if t }}{{ 'b' if no }}{{ {'a': {'b': 1}}['a']['b'] }}{{ {'x': 1}.x }}",
    "{% set j = joiner('; ') %}{% for x in l %}{{ j() }}{{ x }}{% endfor %}",
    "{% for m in people %}{% if m.ok is defined and m.ok %}{{ m.name }}{% endif %}{% endfor %}",
    "{{ '{{' }}{{ '}}' }}{{ '%}' }}{{ \"{%\" }}",
    "{% set x = [1, 2,] %}{{ x }}{{ {'a': 1,} }}{{ (1, 2,) }}",
    "{% for x in [1, 2, 3] | reverse %}{{ x }}{% endfor %}{% for x in people | selectattr('age', '>', 30) %}{{ x.name }}{% endfor %}",
    "line\n\n{% if t %}\n\n  keep\n\n{% endif %}\n\nend\n\n",
    "{% print s %}{%print(n)%}{%if t%}q{%endif%}",
]


class Generation(Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_run"), [], [], body).set_lineno(line)

    def _run(self, caller):
        return caller()


def raise_exception(message):
    raise TemplateError(message)


def strftime_now(text):
    import datetime
    return datetime.datetime(2024, 7, 26, 12, 34, 56).strftime(text)


def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def main():
    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = strftime_now
    out = [{"context": CONTEXT}]
    templates = ["{{ %s }}" % line for line in EXPRESSIONS] + ERRORS + BLOCKS
    for text in templates:
        try:
            out.append({"template": text, "text": env.from_string(text).render(**CONTEXT)})
        except RecursionError:
            out.append({"template": text, "error": "RecursionError"})
        except Exception as e:
            out.append({"template": text, "error": type(e).__name__})
    path = pathlib.Path(__file__).parent.parent / "fixtures" / "chat-templates" / "cases.jsonl"
    path.write_text("".join(json.dumps(x, ensure_ascii=False) + "\n" for x in out))
    errors = sum("error" in x for x in out)
    print(f"{len(out) - 1} cases, {errors} of them errors")


main()
