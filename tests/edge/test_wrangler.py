"""A wrangler file, as an edge of ours reads it: texts in, settings and findings out."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest

from tailrace.edge.wrangler import jsonc
from tailrace.edge.wrangler.checks import CHECKS
from tailrace.edge.wrangler.file import DevVars, Reading, read
from tailrace.edge.wrangler.keys import KEYS, Effect
from tailrace.ledger.errors import ConfigError
from tailrace.ledger.objects.deployment import Deployment

HEAD = 'name = "relay"\nmain = "src/index.ts"\ncompatibility_date = "2026-01-31"\n'
OBJECTS = """
[durable_objects]
bindings = [{name = "STREAMS", class_name = "Stream"}]
[[migrations]]
tag = "v1"
new_sqlite_classes = ["Old"]
[[migrations]]
tag = "v2"
renamed_classes = [{from = "Old", to = "Stream"}]
"""


def reading(text: str, environment: str | None = None, secrets: str = "", **more: Any) -> Reading:
    """Read a TOML file, with the lines that every file must begin with."""
    dev_vars = DevVars(".dev.vars", secrets) if secrets else None
    file = "wrangler.toml"
    return read(HEAD + text, file, environment=environment, dev_vars=dev_vars, **more)


def values(of: Reading) -> dict[str, object]:
    of.check()
    return {setting: source.value for setting, source in of.settings.items()}


def effects(of: Reading) -> dict[str, str]:
    return {one.key: str(one.effect) for one in of.findings}


# ---- jsonc ----


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a": [1, 2,], // x\n "b": "/* , ] */ // \\" ,}", /* y */ }', None),
        ('\ufeff{"a": 1 /*,*/, // ]\n}', {"a": 1}),
        ("[1, /* a */ // b\n ]", [1]),
        ("/**/[[],{},]", [[], {}]),
    ],
)
def test_comments_and_trailing_commas_are_read_past(text: str, value: object) -> None:
    assert jsonc.parse(text) == (value or {"a": [1, 2], "b": '/* , ] */ // " ,}'})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[,]", "line 1 column 2"),
        ("{,}", "line 1 column 2"),
        ("[1,,]", "line 1 column"),
        ('{"a": ,}', "line 1 column 7"),
        ("// x\n/* y\n*/ nothing", "line 3 column 4"),
        ("[1] /* open", "line 1 column 5"),
        ('["open]', "line 1 column 2"),
        ("[1 // ]", "line 1 column"),
        ('{"a": 1, "a": 2}', '"a" is given twice'),
        ("[NaN]", "NaN is not JSON"),
        ("", "line 1 column 1"),
    ],
)
def test_what_is_no_json_is_named_by_its_place_in_the_file(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said.replace("(", r"\(")):
        jsonc.parse(text)


# ---- what is honoured ----


def test_toml_and_jsonc_say_the_same() -> None:
    text = HEAD + 'routes = ["api.example.com/*"]\n[vars]\nTAILRACE_EDGE_DRAIN_S = 9\n' + OBJECTS
    as_json = "// a comment\n" + json.dumps(tomllib.loads(text))
    one, other = read(text, "wrangler.toml"), read(as_json, "wrangler.jsonc")
    assert values(one) == {"hosts": ["api.example.com"], "drain_s": 9}
    assert (values(other), effects(other)) == (values(one), effects(one))


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("dev = {port = 9000}", {"http": ["localhost:9000"]}),
        ('dev = {ip = "*"}', {"http": ["0.0.0.0:8787"]}),
        ('dev = {ip = "::1", port = 0}', {"http": ["[::1]:0"]}),
        ('dev = {local_protocol = "https"}', {"https": ["localhost:8787"], "http": []}),
        ("dev = {inspector_port = 0}", {}),
        ('route = "https://A.example/v1/*"', {"hosts": ["a.example"]}),
        ('route = {pattern = "a.example", custom_domain = true}', {"hosts": ["a.example"]}),
        (
            'routes = ["a.example/*", "a.example*", "b.example"]',
            {"hosts": ["a.example", "b.example"]},
        ),
        ('vars = {TAILRACE_EDGE_ORIGIN = ["a:1"], OTHER = {a = 1}}', {"origin": ["a:1"]}),
        (OBJECTS, {}),
    ],
)
def test_what_a_key_sets(text: str, settings: dict[str, object]) -> None:
    assert values(reading(text)) == settings


def test_variables_win_over_other_keys_and_secrets_over_them() -> None:
    text = 'route = "a.example/*"\ndev = {port = 1}\n[vars]\nTAILRACE_EDGE_HTTP = "h:2"\n'
    text += 'TAILRACE_EDGE_HOSTS = "b.example"\nTAILRACE_EDGE_ORIGIN = "o:1"\n'
    found = reading(text, secrets="TAILRACE_EDGE_ORIGIN=o:2\nexport OTHER='x y' # said\n")
    assert values(found) == {"http": "h:2", "hosts": "b.example", "origin": "o:2"}
    said = effects(found)
    assert said["route"] == said["dev.port"] == said["vars.TAILRACE_EDGE_ORIGIN"] == "ignored"
    assert said[".dev.vars: TAILRACE_EDGE_ORIGIN"] == said["vars.TAILRACE_EDGE_HTTP"] == "honoured"
    assert said[".dev.vars: OTHER"] == "ignored"


def test_what_the_process_has_in_its_environment_wins_and_is_said() -> None:
    found = reading("dev = {port = 1}", outside={"TAILRACE_EDGE_HTTP"})
    why = {one.key: one.why for one in found.findings}
    assert why["dev.port"] == "TAILRACE_EDGE_HTTP of the environment overrides it"


def test_a_setting_of_an_earlier_release_is_ignored_with_the_reason() -> None:
    found = reading('[vars]\nTAILRACE_EDGE_HOST_MODELS = "a.example=b"\n')
    assert values(found) == {}
    (finding,) = (one for one in found.findings if one.key.endswith("HOST_MODELS"))
    assert finding.effect is Effect.IGNORED and "no effect any more" in finding.why


def test_limits_and_observability_are_said_to_have_no_effect() -> None:
    found = reading("limits = {cpu_ms = 5}\nobservability = {logs = {}}\n")
    assert values(found) == {}
    assert set(effects(found).values()) == {"ignored"}
    assert {"limits", "observability"} <= effects(found).keys()


# ---- what origins are told ----


def test_origins_are_told_of_bindings_migrations_and_crons() -> None:
    found = reading('triggers = {crons = ["0 * * * *", "0 * * * *"]}\n' + OBJECTS)
    for key in ("durable_objects", "migrations", "triggers"):
        assert effects(found)[key] == "honoured"
    assert found.deployment is not None
    assert json.loads(found.deployment.encoded()) == {
        "script": "relay",
        "bindings": {"STREAMS": "Stream"},
        "migrations": [
            {
                "tag": "v1",
                "new_sqlite_classes": ["Old"],
                "renamed_classes": [],
                "deleted_classes": [],
            },
            {
                "tag": "v2",
                "new_sqlite_classes": [],
                "renamed_classes": [{"from": "Old", "to": "Stream"}],
                "deleted_classes": [],
            },
        ],
        "crons": ["0 * * * *"],
    }
    assert Deployment.parse(found.deployment.encoded()) == found.deployment


def test_an_environment_is_a_script_of_its_own() -> None:
    own = '[durable_objects]\nbindings = [{name = "B", class_name = "Stream"}]\n'
    text = OBJECTS + "[env.a]\n" + own.replace("[d", "[env.a.d")
    text += '[env.b]\nname = "other"\n' + own.replace("[d", "[env.b.d")
    for name, binding, called in (
        (None, "STREAMS", "relay/Stream"),
        ("a", "B", "relay-a/Stream"),
        ("b", "B", "other/Stream"),
    ):
        deployment = reading(text, name).deployment
        assert deployment is not None
        assert deployment.called(binding) == called


def test_exported_classes_are_told_as_new_ones_and_built_in_ones_are_not() -> None:
    exported = (
        "exports = {%s = {type = 'durable-object'}, StreamObject = {type = 'durable-object'}}"
    )
    assert reading(exported % "SessionObject").deployment is None
    found = reading(exported % "Counter").deployment
    assert found is not None
    assert [step.new_sqlite_classes for step in found.migrations] == [("Counter",), ()]


def test_origins_are_told_of_no_built_in_class_that_is_made_or_deleted() -> None:
    text = """
    [[durable_objects.bindings]]
    name = "COUNTERS"
    class_name = "Counter"
    [[migrations]]
    tag = "v1"
    new_sqlite_classes = ["StreamObject", "SessionObject", "Counter", "Old"]
    [[migrations]]
    tag = "v2"
    deleted_classes = ["SessionObject", "Old"]
    """
    found = reading(text).deployment
    assert found is not None
    made, deleted = found.migrations
    assert (made.new_sqlite_classes, made.deleted_classes) == (("Counter", "Old"), ())
    assert (deleted.new_sqlite_classes, deleted.deleted_classes) == ((), ("Old",))


# ---- environments ----


def test_an_environment_inherits_what_wrangler_has_it_inherit() -> None:
    text = """
    routes = ["top.example/*"]
    limits = {cpu_ms = 1}
    [vars]
    TAILRACE_EDGE_DRAIN_S = 1
    [env.staging]
    vars = {TAILRACE_EDGE_LAME_DUCK_S = 2}
    [env.live]
    vars = {}
    route = "live.example/*"
    """
    assert values(reading(text)) == {"hosts": ["top.example"], "drain_s": 1}
    staging, live = reading(text, "staging"), reading(text, "live")
    assert values(staging) == {"hosts": ["top.example"], "lame_duck_s": 2}
    assert values(live) == {"hosts": ["live.example"]}
    assert effects(live)["routes"] == effects(staging)["vars"] == "ignored"
    assert effects(live)["env.live"] == effects(live)["env.live.route"] == "honoured"
    assert effects(live)["env.staging"] == "ignored"


def test_a_class_may_be_made_by_the_migrations_of_the_top_level() -> None:
    own = '[env.a.durable_objects]\nbindings = [{name = "B", class_name = "Stream"}]\n'
    assert values(reading(OBJECTS + own, "a")) == {}
    wrong = reading(OBJECTS + own.replace("Stream", "Strem"), "a").refused
    assert wrong[0].key == "env.a.durable_objects.bindings.0.class_name"
    assert (wrong[0].environment, wrong[0].hint) == (
        "a",
        "add it to new_sqlite_classes of a migration; there are: Stream",
    )


# ---- what is refused ----

BINDING = 'durable_objects = {bindings = [{name = "A", class_name = "A"%s}]}'
MAKING_A = '\nmigrations = [{tag = "1", new_sqlite_classes = ["A"]}]'


@pytest.mark.parametrize(
    ("text", "key", "said"),
    [
        ('mian = "x"', "mian", "unknown key (did you mean main?)"),
        ('[env.a]\nroutez = ["x"]', "env.a.routez", "did you mean route?"),
        ("[env.a.dev]\nport = 1", "env.a.dev", "belongs at the top level"),
        ("env = 3", "env", "must be a table"),
        ("vars = {}\n[env.a]", "env.a.vars", "is not inherited"),
        (BINDING % "" + MAKING_A + "\n[env.a]", "env.a.durable_objects", "is not inherited"),
        ('route = "a"\nroutes = ["b"]', "route", "routes is given, too"),
        ('route = "*.example.com/*"', "route", "has no wildcards"),
        ('route = "a.example/chat/*"', "route", 'write "a.example/*"'),
        ('route = {pattern = "a.example/*", custom_domain = true}', "route", "has no path"),
        ("routes = [3]", "routes.0", "is not a route"),
        ('routes = "a.example/*"', "routes", "must be an array"),
        ('triggers = {crons = ["0 25 * * *"]}', "triggers.crons.0", "field 2, hour: '25'"),
        ('triggers = {crons = "0 * * * *"}', "triggers.crons", "must be an array"),
        ('triggers = {crons = ["0 0 30 2 *"]}', "triggers.crons.0", "never happens"),
        ('triggers = {crons = ["0 * * * *"]}', "triggers.crons", "nothing to run at these times"),
        ('vars = ["A"]', "vars", "must be a table"),
        ("vars = {A = 2026-01-31}", "vars.A", "is a date"),
        ("vars = {TAILRACE_EDGE_HTPT = 1}", "vars.TAILRACE_EDGE_HTPT", "mean TAILRACE_EDGE_HTTP?"),
        ("vars = {TAILRACE_EDGE_http = 1}", "vars.TAILRACE_EDGE_http", "is not a setting"),
        ("limits = {cpu = 5}", "limits.cpu", "did you mean cpu_ms?"),
        ("limits = {cpu_ms = true}", "limits.cpu_ms", "must be a whole number"),
        (
            "observability = {logs = {head_sampling_rate = 2}}",
            "observability.logs.head_sampling_rate",
            "must be 0 to 1",
        ),
        ("observability = {enable = true}", "observability.enable", "did you mean enabled?"),
        ('dev = {port = "1"}', "dev.port", "must be 0 to 65535"),
        ('secrets = {required = ["A"]}', "secrets.required", "A is not set"),
        (BINDING % "", "durable_objects.bindings.0.class_name", "there are: none"),
        (
            BINDING % ', script_name = "x"',
            "durable_objects.bindings.0.script_name",
            "other scripts",
        ),
        (BINDING % ', klass = "x"', "durable_objects.bindings.0.klass", "unknown key"),
        (
            BINDING % "" + MAKING_A + "\nvars = {A = 1}",
            "durable_objects.bindings.0.name",
            "is the name of a variable",
        ),
        (
            'durable_objects = {bindings = [{name = "A"}]}',
            "durable_objects.bindings.0.class_name",
            "must be a string that is not empty",
        ),
        (
            'migrations = [{tag = "1", new_classes = ["A"]}]',
            "migrations.0.new_classes",
            "write new_sqlite_classes",
        ),
        ("migrations = [{}]", "migrations.0.tag", "must be a string that is not empty"),
        ('migrations = [{tag = "1"}, {tag = "1"}]', "migrations.1.tag", "another migration"),
        (
            'migrations = [{tag = "1", renamed_classes = [{from = "A"}]}]',
            "migrations.0.renamed_classes",
            "must be {from, to}",
        ),
        (
            'exports = {A = {type = "durable-object", storage = "legacy-kv"}}',
            "exports.A.storage",
            "must be SQLite",
        ),
        (
            'exports = {A = {type = "durable-object"}}' + MAKING_A,
            "exports",
            "migrations are given, too",
        ),
        ("kv_namespaces = []", "kv_namespaces", "nothing to bind it to"),
        ("[env.a]\nr2_buckets = []", "env.a.r2_buckets", "nothing to bind it to"),
    ],
)
def test_what_is_refused_names_its_key_and_what_would_be_right(
    text: str, key: str, said: str
) -> None:
    found = reading(text)
    assert key in [one.key for one in found.refused]
    with pytest.raises(ConfigError) as raised:
        found.check()
    assert str(raised.value).startswith("wrangler.toml: ")
    told = [f"{one.why} ({one.hint})" for one in found.refused if one.key == key]
    assert said in told[0]
    assert found.settings == {}


@pytest.mark.parametrize("line", HEAD.splitlines())
def test_what_wrangler_asks_for_must_be_there_and_right(line: str) -> None:
    key = line.partition(" ")[0]
    without = read(HEAD.replace(line, ""), "wrangler.toml")
    assert [(one.key, one.why) for one in without.refused] == [(key, "is missing")]
    for wrong in ('""', "3", "2026-01-31", '"2026-02-30"', '"Über"'):
        found = read(HEAD.replace(line, f"{key} = {wrong}"), "wrangler.toml").refused
        is_text = wrong.startswith('"') and wrong != '""'
        assert [one.key for one in found] == ([] if key == "main" and is_text else [key]) or (
            key == "name" and wrong == '"2026-02-30"'
        )


def test_an_unknown_environment_is_refused_with_those_there_are() -> None:
    (found,) = reading("[env.staging]\n[env.live]\n", "stagign").refused
    assert found.why == "there is no environment 'stagign'"
    assert found.hint == "there are: staging, live"


def test_objects_of_one_name_are_refused() -> None:
    one = '{name = "A", class_name = "A"}'
    text = f"durable_objects = {{bindings = [{one}, {one}]}}" + MAKING_A
    assert [each.key for each in reading(text).refused] == ["durable_objects.bindings.1.name"]


@pytest.mark.parametrize("file", ["wrangler.toml", "wrangler.jsonc", "wrangler.json"])
@pytest.mark.parametrize("text", ["[open", "[]", "[" * 100_000])
def test_a_file_that_is_no_table_is_refused_by_name(file: str, text: str) -> None:
    if file.endswith("toml") and text == "[]":
        text = "= 1"
    with pytest.raises(ConfigError, match=file):
        read(text, file)


# ---- secrets ----


def test_a_secret_is_nowhere_in_findings_and_errors() -> None:
    value = "hunter-two-hunter-two"
    line = f"TAILRACE_EDGE_ORIGIN_SECRET={value}\n"
    found = reading("", secrets=line)
    assert values(found) == {"origin_secret": value}
    for wrong in (f"{value} {value}", f"TAILRACE_EDGE_NO={value}", value):
        refused = reading("", secrets=line + wrong)
        assert refused.refused
        assert value not in str([*found.findings, *refused.findings]), wrong
    listed = reading('secrets = {required = ["OTHER"]}', secrets=line, outside={"OTHER"})
    assert listed.refused[0].why == "is not in secrets.required"


def test_a_secret_in_the_file_is_refused() -> None:
    found = reading('vars = {TAILRACE_EDGE_ORIGIN_SECRET = "hunter-two"}').refused
    assert [(one.why, one.hint) for one in found] == [
        ("is a secret", "set it in .dev.vars or in the environment")
    ]


def test_required_secrets_may_be_in_dev_vars_or_in_the_environment() -> None:
    text = 'secrets = {required = ["A", "B"]}'
    found = reading(text, secrets="A=1", outside={"B"})
    assert effects(found)["secrets"] == "honoured"


def test_every_key_that_is_not_refused_says_why() -> None:
    assert {key.effect for key in KEYS.values()} == set(Effect)
    assert all(key.why for key in KEYS.values())


ODD: list[Any] = [None, True, -1, 0.5, "", "x", [], [None], [[]], {}, {"": None}, {"x": [{}]}]
INNER = [
    "bindings",
    "crons",
    "required",
    "logs",
    "port",
    "ip",
    "pattern",
    "tag",
    "name",
    "class_name",
]
INNER += [
    "renamed_classes",
    "new_sqlite_classes",
    "deleted_classes",
    "type",
    "cpu_ms",
    "local_protocol",
]


@pytest.mark.parametrize("key", ["env", *CHECKS])
def test_no_value_of_a_key_is_more_than_refused(key: str) -> None:
    """Whatever JSON can say, at the top level and in an environment."""
    inner = [{name: odd} for name in INNER for odd in ODD]
    named = {"name": "a", "main": "b", "compatibility_date": "2026-01-31"}
    made = {"migrations": [{"tag": "1", "new_sqlite_classes": ["A"]}]}
    objects = {"durable_objects": {"bindings": [{"name": "A", "class_name": "A"}]}}
    for value in (*ODD, *inner, *([one] for one in inner)):
        for document, environment in (
            ({**named, key: value}, None),
            ({**named, **made, **objects, key: value}, None),
            ({**named, **made, "env": {"a": {**objects, key: value}}}, "a"),
        ):
            found = read(json.dumps(document), "wrangler.json", environment=environment)
            assert found.findings
