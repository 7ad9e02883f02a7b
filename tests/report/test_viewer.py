"""Segmentations on a page, in a real browser: what is seen is what was given, and names are nothing but names."""

import io
import re
from base64 import b64decode, b64encode
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from browser import browse
from polysite.errors import DataError
from polysite.report import viewer as module
from polysite.report.viewer import COLOURS, Shown, plate, viewer

SORT = Path(module.__file__).with_name("sort.js").read_text(encoding="utf-8")
HOSTILE = "</script><b>\"' onerror=alert(1) <!-- {{ 7 * 7 }} $x_1$"
PAGE = """<!doctype html><html><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<style>* { box-sizing: border-box }</style></head><body>%s</body></html>"""
READY = """
  const root = document.querySelector(".viewer"), stage = root.querySelector(".stage");
  const pause = (ms) => new Promise((done) => setTimeout(done, ms));
  const ready = async () => { do await pause(20); while (stage.getAttribute("aria-busy") !== "false"); };
  const canvases = () => [...stage.querySelectorAll("canvas")];
  const look = () => canvases().map((c) => c.toDataURL()).join();
  const press = (element, kind, more) => element.dispatchEvent(new Event(kind, { bubbles: true, ...more }));
  const named = (where, name) => [...root.querySelectorAll(where)].find((l) => l.textContent === name).control;
  const at = (row, column) => { // the colour at shares of the first canvas
    const [canvas] = canvases(), x = Math.floor(column * canvas.width), y = Math.floor(row * canvas.height);
    const copy = Object.assign(document.createElement("canvas"), { width: 1, height: 1 }).getContext("2d");
    copy.drawImage(canvas, x, y, 1, 1, 0, 0, 1, 1);
    return [...copy.getImageData(0, 0, 1, 1).data.slice(0, 3)];
  };
  await ready();
"""


def shown(site="north", case="case 1", why="worst", slices=6, seed=0, **more):
    """Slices of one grey each; on them a square of the truth, and random bits of two methods."""
    rng = np.random.default_rng(seed)
    image = np.broadcast_to((60 + 20 * np.arange(slices, dtype=np.uint8))[:, None, None], (slices, 40, 60))
    truth = np.zeros((slices, 40, 60), np.uint8)
    truth[4 % slices, 10:20, 30:50] = 1
    truth[4 % slices, 25:38, 5:20] = 128
    given = {
        "modalities": ("t1", "flair"),
        "labels": tuple("abcdefgh"),
        "image": np.stack([image, image + 15]),
        "truth": truth,
        "predicted": {m: rng.integers(0, 256, truth.shape, np.uint8) for m in ("alone", "together")},
        "scores": {"alone": {"a": 0.5, "h": float("nan")}, "together": {"a": 0.75}},
    }
    return Shown(site, case, why, **(given | more))


def page(folder, *fragments):
    file = folder / "page.html"
    file.write_text(PAGE % "\n".join(fragments), encoding="utf-8")
    return file


def test_masks_arrive_as_given_outlines_are_where_they_belong_and_every_control_changes_what_it_should(tmp_path):
    script = """
      const text = (bytes) => btoa(Array.from(bytes, (b) => String.fromCharCode(b)).join(""));
      const first = { masks: [0, 1, 2].map((k) => text(root.view.mask(k))), slice: root.view.slice,
        colours: [[15, 30.1], [25.1, 12], [15, 29.8], [15, 40]].map(([y, x]) => at(y / 40, x / 60)) };
      const [slider, output, select] = ["input[type=range]", "output", "select"].map((s) => root.querySelector(s));
      const seen = { start: output.textContent, panels: canvases().length };
      async function changes(act) { const before = look(); await act(); await ready(); return look() !== before; }
      seen.slider = await changes(() => { slider.value = 2; press(slider, "input"); });
      seen.moved = output.textContent;
      const key = (name) => stage.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
      seen.arrow = await changes(() => key("ArrowRight"));
      seen.third = [root.view.slice, slider.value];
      seen.end = (key("End"), key("ArrowUp"), root.view.slice);
      const wheel = () => stage.dispatchEvent(new WheelEvent("wheel", { deltaY: -200, bubbles: true }));
      seen.passing = (wheel(), root.view.slice);
      stage.dispatchEvent(new PointerEvent("pointermove", { movementX: 3, bubbles: true }));
      seen.wheel = (wheel(), root.view.slice);
      seen.modality = await changes(() => root.querySelectorAll(".modality input")[1].click());
      const box = (name) => named(".legend label", name);
      seen.label = await changes(() => box("c").click());
      seen.method = await changes(() => box("together").click());
      seen.fewer = canvases().length;
      root.querySelectorAll(".mode input")[1].click();
      seen.over = canvases().length;
      seen.added = await changes(() => box("together").click());
      seen.outlines = await changes(() => box("all outlines").click());
      seen.groups = [...select.querySelectorAll("optgroup")].map((g) => g.label);
      seen.another = await changes(() => { select.value = 2; press(select, "change"); });
      seen.title = [root.view.title, select.selectedOptions[0].textContent];
      const hidden = (place) => getComputedStyle(root.querySelector(place)).display;
      seen.hidden = [hidden(".slices"), hidden(".plane")]; // of one slice; without depths
      return [first, seen];
    """
    cases = [shown(), shown(case="case 2", seed=1), shown("south", "case 3", "best", slices=1, seed=2)]
    (first, seen), errors = browse(page(tmp_path, viewer(cases)), READY + script)
    assert errors == []
    given = [b64encode(m.tobytes()).decode() for m in (cases[0].truth, *cases[0].predicted.values())]
    assert first["masks"] == given and first["slice"] == cases[0].start == 4
    outlines = [[int(c[k : k + 2], 16) for k in (1, 3, 5)] for c in (COLOURS[0], COLOURS[7])]
    assert abs(np.array(first["colours"]) - [*outlines, [140] * 3, [140] * 3]).max() < 20
    assert seen == {
        "start": "slice 5 of 6", "panels": 3, "slider": True, "moved": "slice 2 of 6", "arrow": True, "third": [2, "3"],
        "end": 5, "passing": 5, "wheel": 3, "modality": True, "label": True, "method": True, "fewer": 2, "over": 1,
        "added": True, "outlines": True, "groups": ["north", "south"], "another": True,
        "title": ["case 3 · best · Dice 0.50", "south · case 3 · best · Dice 0.50"], "hidden": ["none", "none"],
    }  # fmt: skip


def test_errors_zoom_greys_and_a_second_plane(tmp_path):
    truth = np.zeros((6, 40, 60), np.uint8)
    truth[4, 10:20, 30:50] = 1
    found = np.zeros_like(truth)
    found[4, 10:20, 40:56] = 1  # ten columns missed, six too many
    image = np.full((1, 6, 40, 60), 100, np.uint8)
    image[0, 5] = 200  # the uppermost slice
    case = shown(
        image=image, modalities=("t1",), labels=("a",), truth=truth, predicted={"alone": found}, scores={},
        depths=(2.0,) * 5 + (10.0,),
    )  # fmt: skip
    script = """
      const choose = (name) => named(".choices label", name).click();
      choose("errors");
      const seen = { panels: canvases().length, words: stage.textContent };
      seen.missed = at(14.5 / 40, 35.5 / 60);
      seen.extra = [at(14.5 / 40, 52.5 / 60), at(14.5 / 40, 53.5 / 60)];
      seen.agreed = at(14.5 / 40, 45.5 / 60);
      choose("side by side");
      const [out, near] = root.querySelectorAll(".zoom button");
      near.click();
      near.click();
      seen.zoom = root.view.zoom;
      out.click();
      const [wide, level] = root.querySelectorAll(".grey input");
      for (const [input, value] of [[wide, 50], [level, 75]]) { input.value = value; press(input, "input"); }
      seen.dark = at(0.02, 0.02); // 100 of 255 is 39 %, below the window from 50 % to 100 %
      root.querySelector(".reset").click();
      seen.again = [root.view.zoom, at(0.02, 0.02)];
      choose("coronal");
      seen.where = root.querySelector("output").textContent;
      seen.plane = [at(0.25, 0.9), at(0.75, 0.9)]; // the last slice fills the upper half
      choose("axial");
      seen.back = root.querySelector("output").textContent;
      return seen;
    """
    seen, errors = browse(page(tmp_path, viewer([case])), READY + script)
    assert errors == []
    assert seen["panels"] == 1 and "missed 100, extra 60" in seen["words"]
    assert abs(np.array(seen["missed"]) - (213, 94, 0)).max() < 30
    pale, full = sorted(seen["extra"], key=lambda c: c[2])
    assert abs(np.array(full) - (86, 180, 233)).max() < 30 and abs(np.array(pale) - (95, 128, 147)).max() < 20
    assert abs(np.array(seen["agreed"]) - 100).max() < 6
    assert seen["zoom"] == 2.25 and max(seen["dark"]) < 6
    assert seen["again"][0] == 1 and abs(np.array(seen["again"][1]) - 100).max() < 6
    assert seen["where"] == "slice 11 of 40" and seen["back"] == "slice 5 of 6"
    assert abs(np.array(seen["plane"]) - [[200] * 3, [100] * 3]).max() < 6


def test_names_are_only_text_and_a_phone_has_room_for_fingers(tmp_path):
    labels = (HOSTILE, "b")
    methods = {HOSTILE: shown().truth, "__proto__": shown().truth, "truth": shown().truth}
    case = shown(
        HOSTILE, HOSTILE, HOSTILE, modalities=(HOSTILE, "t2"), labels=labels, truth=shown().truth & 1,
        predicted={n: m & 3 for n, m in methods.items()}, scores={HOSTILE: {HOSTILE: 0.5}},
    )  # fmt: skip
    script = """
      const targets = [...root.querySelectorAll("select, button, label")];
      const small = targets.filter((e) => e.getBoundingClientRect().height < 40).map((e) => e.outerHTML);
      const names = [...root.querySelectorAll("tbody th")].map((e) => e.textContent);
      return { names, small, bold: document.querySelectorAll("b").length, panels: canvases().length,
        label: root.querySelector("thead th + th").textContent, site: root.querySelector("optgroup").label,
        wide: document.documentElement.scrollWidth, plate: document.querySelector("img").alt };
    """
    seen, errors = browse(page(tmp_path, viewer([case]), plate([case])), READY + script, width=360)
    assert errors == []
    assert seen["names"] == ["truth", *methods] and seen["panels"] == 4
    assert seen["label"] == seen["site"] == HOSTILE and HOSTILE in seen["plate"]
    assert (seen["bold"], seen["small"], seen["wide"]) == (0, [], 360)


TABLE = """<table class="sortable"><thead><tr><th>name</th><th>Dice</th><th><i>sent</i></th><th>given</th></tr></thead>
<tbody><tr><td>b 10</td><td>0.812 ± 0.034</td><td>1 234 kB</td><td data-value="2">x</td></tr>
<tr><td>b 9</td><td>–</td><td>12.3 MB</td><td data-value="1">z</td></tr>
<tr><td>a</td><td>−0.05</td><td>900 B</td><td data-value="10">y</td></tr>
<tr class="total"><td>all</td><td>0.5</td><td>2 MB</td><td></td></tr>
<tr class="label"><td>WT</td><td>0.1</td><td>–</td><td></td></tr></tbody></table>"""


def test_tables_sort_both_ways_and_totals_stay_last(tmp_path):
    script = """
      const [table] = document.querySelectorAll("table"), buttons = [...table.querySelectorAll("th button")];
      const rows = () => [...table.tBodies[0].rows].map((r) => r.cells[0].textContent).join();
      const seen = { buttons: buttons.map((b) => b.textContent), orders: [] };
      for (const button of buttons) for (const time of [1, 2]) {
        button.click();
        seen.orders.push([rows(), [...table.querySelectorAll("[aria-sort]")].map((h) => h.ariaSort)]);
      }
      return { ...seen, left: document.querySelectorAll(".plain button").length };
    """
    plain = TABLE.replace("sortable", "plain")
    twice = page(tmp_path, TABLE, plain, f"<script>{SORT}</script><script>{SORT}</script>")
    seen, errors = browse(twice, script)
    assert errors == [] and seen["left"] == 0
    assert seen["buttons"] == ["name", "Dice", "sent", "given"]
    up, down = ["ascending"], ["descending"]
    last = ",all,WT"
    assert seen["orders"] == [
        ["a,b 9,b 10" + last, up], ["b 10,b 9,a" + last, down],
        ["a,b 10,b 9" + last, up], ["b 10,a,b 9" + last, down],
        ["a,b 10,b 9" + last, up], ["b 9,b 10,a" + last, down],
        ["b 9,b 10,a" + last, up], ["a,b 10,b 9" + last, down],
    ]  # fmt: skip


@pytest.mark.parametrize("halvings", [0, 1])
def test_a_sheet_holds_every_slice(halvings):
    smooth = np.linspace(40, 200, 5 * 150, dtype=np.uint8).reshape(5, 150, 1).repeat(131, axis=2)
    sheet = module._sheet(smooth, halvings)
    picture = np.asarray(Image.open(io.BytesIO(b64decode(sheet.url.split(",")[1]))))
    rows, columns = (int(n) for n in sheet.size)
    for k, given in enumerate(smooth):
        top, left = (n * t for n, t in zip(divmod(k, sheet.across), sheet.tile, strict=True))
        found = picture[top : top + rows, left : left + columns].astype(int)
        assert abs(found - given[:: 1 + halvings, : columns * (1 + halvings) : 1 + halvings][:rows]).max() <= 3


def test_background_around_all_slices_is_cut_off_but_nothing_that_is_drawn():
    image, truth = np.zeros((2, 6, 100, 200), np.uint8), np.zeros((6, 100, 200), np.uint8)
    image[1, 3, 40:60, 50:90] = 200
    truth[2, 30, 150] = 1
    case = replace(shown(), image=image, truth=truth, predicted={"alone": truth})
    cut = module.trim(case)
    assert cut.image.shape == (2, 6, 36, 113) and cut.truth.shape == cut.predicted["alone"].shape == (6, 36, 113)
    assert cut.truth[2, 3, 106] == 1 and cut.truth.sum() == 1
    blank = replace(case, image=image * 0, truth=truth * 0, predicted={})
    assert module.trim(blank).truth.shape == (6, 100, 200) and (case.start, blank.start) == (2, 3)


def test_a_plate_holds_the_cases_that_matter_most():
    every = ("best", "median", "worst")
    cases = [shown(f"s{k}", f"c-{why}", why, slices=1, predicted={}) for k in range(6) for why in every]
    for count, ranks, rows in ((3, set(every), 3), (6, {"median", "worst"}, 4), (18, {"worst"}, 5)):
        text = plate(cases[:count], most=5)
        assert {why for why in every if f"c-{why}" in text} == ranks and len(re.findall(r"s\d, c-", text)) == rows
    assert plate(cases[:9]).count("<img") == 2  # no more than six rows in one
    assert (plate([]), viewer([])) == ("", "")


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"labels": tuple("abcdefghi")}, "9 labels"),
        ({"modalities": ("t1",)}, "for 1 modalities"),
        ({"truth": np.zeros((5, 40, 60), np.uint8)}, r"the truth is uint8 of shape \(5, 40, 60\)"),
        ({"predicted": {"alone": np.zeros((6, 40, 60), bool)}}, "alone is bool"),
    ],
)
def test_what_cannot_be_shown_is_refused_by_name(wrong, words):
    with pytest.raises(DataError, match=f"case 'case 1' of site 'north'.*{words}"):
        shown(**wrong)
