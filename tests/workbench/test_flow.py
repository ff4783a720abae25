"""attnworks flow: the page holds the bytes that the model counts, and steps through them in a browser."""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from click.testing import CliRunner

from attnworks import traffic
from attnworks.masks import Causal, Window
from attnworks.workbench import flow, loops, schedules
from attnworks.workbench.cli import main
from attnworks.workbench.providers import describe
from browser import chromium, opened

PARTS = tuple(flow.PARTS)


def problem(seq_q=250, seq_kv=200, heads_q=4, heads_kv=2, mask=None, batch=2):
    return describe(
        form="dense", batch=batch, heads_q=heads_q, heads_kv=heads_kv, seq_q=seq_q, seq_kv=seq_kv, head_dim=64,
        head_dim_v=32, dtype=torch.float16, mask=mask,
    )  # fmt: skip


def tiled(known, tile_q=64, tile_kv=32):
    return [one.with_tiles(tile_q, tile_kv) for one in known.values()]


def expanded(told):
    """The steps that the browser makes of runs: (pass, kind, tile of queries, tile of keys, moves)."""
    for number, kind, q_tile, kv_tile, length, moves in told["runs"]:
        by_kv = told["passes"][number]["inner"] == "kv"
        for n in range(length):
            tiles = (q_tile, kv_tile + n) if by_kv else (q_tile + n, kv_tile)
            yield (number, kind, *tiles, told["moves"][moves])


@pytest.mark.parametrize("known", [schedules.FORWARD, schedules.BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("mask", [None, Causal(), Window(40, 9)], ids=repr)
def test_the_page_has_every_step_and_no_other(known, mask):
    p = problem(mask=mask)
    for schedule, told in zip(tiled(known), flow.story(p, tiled(known))["schedules"], strict=True):
        walked = [
            (step.number, ("begin", "visit", "end").index(step.kind),
             *(-1 if tile is None else tile for tile in (step.q_tile, step.kv_tile)), [list(m) for m in step.moves])
            for step in loops.walk(p, schedule)
        ]  # fmt: skip
        assert list(expanded(told)) == walked
        assert len(walked) == told["steps"]


@pytest.mark.parametrize("name", traffic.SCHEDULES)
@pytest.mark.parametrize("mask", [None, Causal(), Window(40, 9)], ids=repr)
def test_its_totals_are_the_bill(name, mask):
    p = problem(mask=mask)
    told = flow.story(p, [schedules.FORWARD[name].with_tiles(64, 32)])["schedules"][0]
    assert told["all_bytes"] == traffic.estimate(p, name, 64, 32).total_bytes
    alone = problem(heads_q=1, heads_kv=1, mask=mask, batch=1)
    assert sum(told["head_bytes"].values()) == traffic.estimate(alone, name, 64, 32).total_bytes


def test_the_example_is_the_softmax_of_its_row():
    p = problem(mask=Causal())
    grid = flow.story(p, [schedules.Q_OUTER.with_tiles(64, 32)])["schedules"][0]["grids"][0]
    drawn = torch.Generator().manual_seed(0)
    q = torch.randn(4, 64, generator=drawn, dtype=torch.float64)
    k = torch.randn(200, 64, generator=drawn, dtype=torch.float64)
    for tile, states in enumerate(grid["example"]):
        assert [len(states)] == [grid["ranges"][tile][1] - grid["ranges"][tile][0]]
        seen = (q[tile] @ k[: 64 * tile - 50 + 1].T / 8) if 64 * tile >= 50 else torch.zeros(0)
        if len(seen):
            m, total = states[-1]
            assert m + math.log(total) == pytest.approx(float(seen.logsumexp(0)), abs=2e-3)
        elif states:
            assert states[-1] == (None, 0)


def test_long_sequences_stay_small_and_too_many_tiles_are_refused():
    long = problem(4096, 4096, heads_q=32, heads_kv=8, mask=Causal())
    text = flow.render(flow.story(long, tiled(schedules.FORWARD, 64, 64)))
    assert len(text) < 1_000_000
    assert not re.search(r'(src|href)="(?!data:)|https?://(?!www.w3.org/2000/svg)', text), "it needs nothing else"
    with pytest.raises(ValueError, match=r"tile_q: was 16, which makes 256 tiles .* at least 32"):
        flow.story(long, tiled(schedules.FORWARD, 16, 64))


def test_the_command_writes_the_page_and_tells_its_bytes(tmp_path):
    out = tmp_path / "page.html"
    ran = CliRunner().invoke(main, ["flow", "--seq", "256", "--causal", "--out", str(out), "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.output)
    assert [one["name"] for one in found["schedules"]] == list(traffic.SCHEDULES)
    assert 'id="story"' in out.read_text()
    refused = CliRunner().invoke(main, ["flow", "--schedule", "fastest", "--out", str(out)])
    assert refused.exit_code == 1 and "FILE.py:NAME" in refused.output
    refused = CliRunner().invoke(main, ["flow", "--decode", "--out", str(out)])
    assert refused.exit_code == 2 and "--decode" in refused.output


# ---- in the browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


def so_far(walked, step):
    """Bytes by schedule and part after ``step`` steps, from the loops themselves."""
    found = {}
    for name, steps in walked.items():
        parts = flow.totals(steps[: step + 1])
        found[name] = [sum(parts.values()), *(parts[part] for part in PARTS)]
    return found


def shown(page):
    script = """parts => Object.fromEntries([...document.querySelectorAll("#bill td[data-schedule]")].map(cell =>
        [cell.dataset.schedule, [Number(cell.dataset.bytes), ...parts.map(part =>
            Number(cell.dataset[part.replace(/_(.)/g, (_, c) => c.toUpperCase())]))]]))"""
    return page.evaluate(script, list(PARTS))


def step_shown(page):
    return int(re.match(r"step (\d+) of", page.text_content("#step"))[1]) - 1


@pytest.mark.parametrize("known", [schedules.FORWARD, schedules.BACKWARD], ids=["forward", "backward"])
def test_it_steps_by_click_and_key_and_counts_as_the_model_does(browser, tmp_path, known):
    p = problem(mask=Causal())
    told = flow.story(p, tiled(known))
    walked = {schedule.name: list(loops.walk(p, schedule)) for schedule in tiled(known)}
    last = max(one["steps"] for one in told["schedules"]) - 1
    file = tmp_path / "flow.html"
    file.write_text(flow.render(told), encoding="utf-8")
    page, said = opened(browser, file)
    assert page.locator(".panel svg").count() == 3
    acts = [
        (lambda: None, 0),
        (lambda: page.click("#on"), 1),
        (lambda: page.click("#on"), 2),
        (lambda: page.keyboard.press("ArrowRight"), 3),
        (lambda: page.click("#back"), 2),
        (lambda: page.keyboard.press("ArrowLeft"), 1),
        (lambda: page.fill("#slider", str(last // 3)), last // 3),
        (lambda: page.keyboard.press("ArrowRight"), last // 3 + 1),
        (lambda: page.fill("#slider", str(last // 2)), last // 2),
        (lambda: page.keyboard.press("End"), last),
        (lambda: page.keyboard.press("ArrowRight"), last),
        (lambda: page.keyboard.press("Home"), 0),
        (lambda: page.click("#last"), last),
        (lambda: page.click("#first"), 0),
    ]
    for act, expected in acts:
        act()
        assert step_shown(page) == expected
        assert shown(page) == so_far(walked, expected), expected
    page.keyboard.press("PageDown")
    begun = step_shown(page)
    assert begun > 0
    assert all(page.locator(".panel .says").nth(n).text_content() for n in range(3))
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Space")
    page.wait_for_function(f"at > {begun}", timeout=5000)
    page.keyboard.press("Space")
    assert step_shown(page) > begun and page.evaluate("timer") is None
    assert said == []


def test_every_step_of_a_small_problem_is_drawn_without_an_error(browser, tmp_path):
    p = problem(100, 70, mask=Window(30, 0))
    file = tmp_path / "flow.html"
    file.write_text(flow.render(flow.story(p, tiled(schedules.FORWARD))), encoding="utf-8")
    page, said = opened(browser, file)
    drawn = page.evaluate("""() => { const found = [];
        for (let n = 0; n < LAST; n++) { show(n); found.push(document.getElementById("panels").innerHTML); }
        return found; }""")
    assert len(set(drawn)) == len(drawn), "every step looks different"
    assert not any("NaN" in one or "undefined" in one for one in drawn)
    assert said == []
