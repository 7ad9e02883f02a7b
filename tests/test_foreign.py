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


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_toml_is_refused_with_one_sentence(text):
    with pytest.raises(ConfigError, match="the study") as refusal:
        parse_toml(text, "the study")
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 400


READERS = {
    "study": lambda folder: config.load(folder / "x.toml"),
    "policy": lambda folder: SitePolicy.load(folder / "x.toml"),
    "bench": lambda folder: bench.load(str(folder / "x.toml")),
    "space": lambda folder: space.load(folder / "x.toml"),
    "site": lambda folder: SiteConfig.load(folder / "x.toml"),
    "project": lambda folder: Project.load(folder),
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("text", ["dotted", "lists", "digits", "hexadecimal"])
def test_every_reader_of_toml_names_the_file(tmp_path, name, text):
    for file in ("x.toml", "server.toml"):
        (tmp_path / file).write_text(HOSTILE[text])
    with pytest.raises(PolysiteError) as refusal:
        READERS[name](tmp_path)
    assert ("server.toml" if name == "project" else "x.toml") in str(refusal.value)


def test_depth_is_counted_where_it_matters():
    sound = 'a = """[[[[' + "[" * 100 + '"""\nb = "' + "." * 100 + '"\nc = [0.5, 0.5]  # ' + "[" * 100 + "\n"
    assert parse_toml(sound, "it")["c"] == [0.5, 0.5]
    deep = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    assert parse_toml(f"a = {deep}\nb.c.d = 1\n", "it")["b"] == {"c": {"d": 1}}
    many = "".join(f"[[then]]\na.b.c = {k}\n" for k in range(100))
    assert len(parse_toml(many, "it")["then"]) == 100


def test_a_study_has_a_bounded_number_of_phases():
    with pytest.raises(ConfigError, match="then has 5000 phases"):
        config.parse("[[then]]\nrun.rounds = 1\n" * 5000)


def test_json_that_is_nested_too_deeply_is_a_value_error():
    with pytest.raises(ValueError, match="nested"):
        parse_json("[" * 100_000)
    assert parse_json(memoryview(b'{"a": 1}')) == {"a": 1}


def test_a_long_value_is_shown_in_part():
    with pytest.raises(ConfigError) as refusal:
        config.parse(f"seed = [{'1,' * 10_000}]")
    assert len(str(refusal.value)) < 500
