"""TOML and JSON of strangers: one sentence, whatever is in them, and no long computation."""

import pytest

from polysite import config
from polysite.benchmark import bench
from polysite.deploy.project import Project, SiteConfig
from polysite.deploy.site.policy import SitePolicy
from polysite.errors import ConfigError, PolysiteError
from polysite.foreign import MAX_DEPTH, MAX_TOML, parse_json, parse_toml
from polysite.tuning import space

HOSTILE = {
    "lists": "a = " + "[" * 100_000,
    "tables": "a = " + "{a=" * 50_000,
    "dotted": ".".join("a" * 300_000) + " = 1",
    "quoted": " . ".join(['"a"'] * 100_000) + " = 1",
    "header": "[" + ".".join("a" * 100_000) + "]",
    "digits": "a = " + "9" * 10_000,
    "hexadecimal": "seed = 0x" + "f" * 10_000,
    "escapes": '"a\\' * 100_000,
    "length": "# " + "x" * MAX_TOML,
    "null": "a = \0",
}
READERS = (config.load, SitePolicy.load, bench.load, space.load, SiteConfig.load)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_toml_is_refused_with_one_sentence(text):
    with pytest.raises(ConfigError, match="the study") as refusal:
        parse_toml(text, "the study")
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


def test_every_reader_of_toml_names_the_file(tmp_path):
    file = tmp_path / "x.toml"
    for place in (file, tmp_path / "server.toml"):
        place.write_text(HOSTILE["digits"])
    for load in READERS:
        with pytest.raises(PolysiteError, match=r"x\.toml"):
            load(str(file) if load is bench.load else file)
    with pytest.raises(PolysiteError, match=r"server\.toml"):
        Project.load(tmp_path)


def test_depth_is_counted_where_it_matters_and_json_that_is_too_deep_is_a_value_error():
    sound = 'a = """[[[[' + "[" * 100 + '"""\nb = "' + "." * 100 + '"\nc = [0.5, 0.5]  # ' + "[" * 100 + "\n"
    assert parse_toml(sound, "it")["c"] == [0.5, 0.5]
    deep = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert parse_toml(f"a = {deep}\nb.c.d = 1\n", "it")["b"] == {"c": {"d": 1}}
    many = "".join(f"[[then]]\na.b.c = {k}\n" for k in range(100))
    assert len(parse_toml(many, "it")["then"]) == 100
    assert parse_json(memoryview(b'{"a": 1}')) == {"a": 1}
    with pytest.raises(ValueError, match="nested"):
        parse_json("[" * 100_000)


def test_many_phases_are_refused_and_a_long_value_is_shown_in_part():
    with pytest.raises(ConfigError, match="then has 5000 phases"):
        config.parse("[[then]]\nrun.rounds = 1\n" * 5000)
    with pytest.raises(ConfigError) as refusal:
        config.parse(f"seed = [{'1,' * 10_000}]")
    assert len(str(refusal.value)) < 500
