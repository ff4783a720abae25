"""attnworks flow: the page holds the bytes that the model counts, and steps through them in a browser."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from attnworks import traffic
from attnworks.masks import Causal, Window
from attnworks.masks import split as split_mask
from attnworks.workbench import flow, loops, papers
from attnworks.workbench.cli import main
from attnworks.workbench.grid import maps_of
from attnworks.workbench.providers import describe
from browser import chromium, opened

PARTS = tuple(flow.PARTS)
EXAMPLES = Path(__file__).parents[2] / "examples"


def problem(seq_q=250, seq_kv=200, heads_q=4, heads_kv=2, mask=None, batch=2):
    return describe(
        form="dense", batch=batch, heads_q=heads_q, heads_kv=heads_kv, seq_q=seq_q, seq_kv=seq_kv, head_dim=64,
        head_dim_v=32, dtype=torch.float16, mask=mask,
    )  # fmt: skip


def tiled(known, tile_q=64, tile_kv=32):
    return [one.with_tiles(tile_q, tile_kv) for one in known.values()]


def expanded(told):
    """The steps that the browser makes of runs: (pass, kind, tile of queries, tile of keys, moves)."""
    for number, kind, q_tile, kv_tile, length, moves, share in told["runs"]:
        by_kv = told["passes"][number]["inner"] == "kv"
        for n in range(length):
            tiles = (q_tile, kv_tile + n) if by_kv else (q_tile + n, kv_tile)
            yield (number, kind, *tiles, told["moves"][moves], share)


@pytest.mark.parametrize("known", [papers.FORWARD, papers.BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("mask", [None, Causal(), Window(40, 9)], ids=repr)
def test_the_page_has_every_step_and_no_other(known, mask):
    p = problem(mask=mask)
    for schedule, told in zip(tiled(known), flow.story(p, tiled(known))["schedules"], strict=True):
        walked = [
            (step.number, ("begin", "visit", "end").index(step.kind),
             *(-1 if tile is None else tile for tile in (step.q_tile, step.kv_tile)), [list(m) for m in step.moves],
             step.share)
            for step in loops.walk(p, schedule)
        ]  # fmt: skip
        assert list(expanded(told)) == walked
        assert len(walked) == told["steps"]


@pytest.mark.parametrize("name", traffic.SCHEDULES)
@pytest.mark.parametrize("mask", [None, Causal(), Window(40, 9)], ids=repr)
def test_its_totals_are_the_bill(name, mask):
    p = problem(mask=mask)
    told = flow.story(p, [papers.FORWARD[name].with_tiles(64, 32)])["schedules"][0]
    assert told["all_bytes"] == traffic.estimate(p, name, 64, 32).total_bytes
    alone = problem(heads_q=1, heads_kv=1, mask=mask, batch=1)
    assert sum(told["head_bytes"].values()) == traffic.estimate(alone, name, 64, 32).total_bytes


def test_the_example_is_the_softmax_of_its_row():
    p = problem(mask=Causal())
    told = flow.story(p, [papers.Q_OUTER.with_tiles(64, 32)])["schedules"][0]
    [grid], [one] = told["grids"], told["passes"]
    drawn = torch.Generator().manual_seed(0)
    q = torch.randn(4, 64, generator=drawn, dtype=torch.float64)
    k = torch.randn(200, 64, generator=drawn, dtype=torch.float64)
    for tile, states in enumerate(one["example"]):
        assert len(states) == sum(stop - start for start, stop, _ in grid["spans"][tile])
        seen = (q[tile] @ k[: 64 * tile - 50 + 1].T / 8) if 64 * tile >= 50 else torch.zeros(0)
        if len(seen):
            m, total = states[-1]
            assert m + math.log(total) == pytest.approx(float(seen.logsumexp(0)), abs=2e-3)
        elif states:
            assert states[-1] == (None, 0)


# ---- caches, packed sequences, any mask ------------------------------------------------------------------------------

LENGTHS = [(70, 70), (1, 90), (0, 33), (40, 64)]
BLOCKS = torch.rand(4, 4, generator=torch.Generator().manual_seed(5)) < 0.4


def blocks(b, h, q, k):
    return BLOCKS[q // 32, k // 64] | (k == 3)


def decode():
    """Caches of different lengths; the partial results of four shares of the longest, and their merge."""
    p = describe(
        form="decode", batch=3, heads_q=6, heads_kv=2, seq_q=1, seq_kv=250, head_dim=64, head_dim_v=32,
        dtype=torch.float16,
    )  # fmt: skip
    split = replace(papers.SPLIT_KV, split_kv=64).with_tiles(64, 32)
    asked = [papers.STANDARD.with_tiles(64, 32), papers.Q_OUTER.with_tiles(64, 32), split]
    return p, asked, {"lengths": [(1, 100), (1, 250), (1, 30)]}


def packed():
    totals = {"total_q": 111, "total_kv": 257}
    p = replace(problem(70, 90, mask=Causal(), batch=4), form="varlen", **totals)
    return p, tiled(papers.FORWARD), {"lengths": LENGTHS}


def masked():
    p = problem(128, 250, mask=blocks, batch=2)
    return p, tiled(papers.FORWARD), {"maps": maps_of(p, split_mask(blocks)[1])}


def cut():
    """Four tiles of the last head are whole, eight are cut into one, two or three parts."""
    p = describe(
        form="dense", batch=1, heads_q=2, heads_kv=1, seq_q=96, seq_kv=320, head_dim=64, head_dim_v=32,
        dtype=torch.float16,
    )  # fmt: skip
    edges = ((), (3,), (1, 6), (9,), (2, 4), (5,), (), (7, 8))
    body = replace(papers.Q_OUTER.passes[0], cuts=edges, parts=("part",))
    merge = loops.Pass("merge", outer="q", keeps=("part",), leaves=("out", "lse"), cuts=edges)
    return p, [replace(papers.Q_OUTER, passes=(body, merge), tile_q=8, tile_kv=32)], {}


def steps_of(p, asked, lengths=None, maps=None):
    """Of what the page shows of a problem."""
    if p.form == "decode":
        p = replace(p, seq_kv=max(keys for _, keys in lengths))
    walked = {"lengths": lengths if p.form == "varlen" else None, "maps": maps}
    return {schedule.name: list(loops.walk(p, schedule, **walked)) for schedule in asked}


@pytest.mark.parametrize("posed", [decode, packed, masked])
def test_every_form_has_its_steps_and_all_its_bytes(posed):
    p, asked, given = posed()
    walked = steps_of(p, asked, **given)
    lengths = given.get("lengths") or [(p.seq_q, p.seq_kv)] * p.batch
    for schedule, told in zip(asked, flow.story(p, asked, **given)["schedules"], strict=True):
        steps = [
            (step.number, ("begin", "visit", "end").index(step.kind),
             *(-1 if tile is None else tile for tile in (step.q_tile, step.kv_tile)), [list(m) for m in step.moves],
             step.share)
            for step in walked[schedule.name]
        ]  # fmt: skip
        assert list(expanded(told)) == steps
        total = 0
        for seq_q, seq_kv in lengths:
            one = replace(p, batch=1, form="decode" if p.form == "decode" else "dense", seq_q=seq_q, seq_kv=seq_kv)
            maps = given.get("maps") and maps_of(one, given["maps"].operands)
            together = all(each.together for each in schedule.passes)
            for first, heads in ((True, p.heads_kv), (False, 0 if together else p.heads_q - p.heads_kv)):
                alone = loops.walk(one, schedule, first_of_group=first, maps=maps) if heads else ()
                total += heads * sum(flow.totals(alone).values())
        assert told["all_bytes"] == total


def test_a_cache_is_shared_out_and_its_partial_results_are_merged():
    p, asked, given = decode()
    told = flow.story(p, asked, **given)["schedules"][2]
    assert [len(one["shares"]) for one in told["passes"]] == [4, 4, 1]
    part = next(array for array in told["arrays"] if array["name"] == "part")
    assert part["shares"] == 4 and part["made"]
    rows = 3 * 4 * (32 + 1) * 4  # three heads of a group in each of four shares: O and LSE in fp32
    moves = [move for *_, moved, _ in expanded(told) for move in moved if move[0] == "part"]
    assert sum(size for _, stored, size, _ in moves if stored) == rows
    assert sum(size for _, stored, size, _ in moves if not stored) == rows
    bill = traffic.estimate(replace(p, batch=1, seq_kv=250), "split_kv", tile_kv=64)
    assert bill.state == 2 * rows * p.heads_kv


def test_packed_sequences_never_meet():
    p, asked, given = packed()
    story = flow.story(p, asked, **given)
    assert "4 packed sequences, N = 70, 1 × 90, 0 × 33, 40 × 64" in story["problem"]
    for told in story["schedules"]:
        for one in told["passes"]:
            grid = told["grids"][one["grid"]]
            for (low, high), spans in zip(grid["own"], grid["spans"], strict=True):
                assert all(low <= start < stop <= high for start, stop, _ in spans)


def test_parts_of_cut_tiles_come_in_rounds_and_are_merged_tile_by_tile():
    p, asked, _ = cut()
    told = flow.story(p, asked)["schedules"][0]
    forward, merge = told["passes"]
    assert (forward["whole"], merge["whole"], len(forward["shares"])) == (4, 4, 3)
    assert [share[6] for share in forward["shares"]] == [[0, 1], [1, 6], [6, 10]]
    assert [share[3] for share in forward["shares"]] == [[0, 10], [10, 10], [10, 10]], "a whole one"
    part = next(array for array in told["arrays"] if array["name"] == "part")
    assert part["shares"] == 3 and part["made"]
    ends = [(number, q, share) for number, kind, q, _, _, share in expanded(told) if kind == 2]
    assert ends[:12] == [(0, row, 0) for row in range(12)]
    assert ends[12:18] == [(0, row, 1) for row in (5, 6, 7, 8, 9, 11)] and ends[18:21] == [
        (0, n, 2) for n in (6, 8, 11)
    ]
    assert ends[21:] == [(1, row, len(own)) for row, own in zip(range(4, 12), asked[0].passes[0].cuts, strict=True)]
    assert "the last head" in flow.story(p, asked)["stepped"]
    heads = [flow.totals(loops.walk(p, asked[0], head=head, first_of_group=head == 0)) for head in range(2)]
    assert told["all_bytes"] == sum(sum(one.values()) for one in heads) and heads[1] == Counter(told["head_bytes"])


@pytest.mark.parametrize("posed", [decode, packed, masked, cut])
def test_the_example_sees_what_its_row_sees(posed):
    p, asked, given = posed()
    told = flow.story(p, asked[-1:], **given)["schedules"][0]
    one = told["passes"][0]
    grid = told["grids"][one["grid"]]
    assert len(one["example"]) == grid["rows"]
    for states, spans in zip(one["example"], grid["spans"], strict=True):
        assert len(states) == sum(stop - start for start, stop, _ in spans)
        assert all(m is not None and total >= 0.99 for m, total in states[:1]) or posed is not decode
    if posed is decode:  # each share begins anew: its sum is of its own keys alone
        assert one["example"][0][1][1] > one["example"][0][2][1]


def test_long_sequences_stay_small_and_too_many_tiles_are_refused():
    long = problem(4096, 4096, heads_q=32, heads_kv=8, mask=Causal())
    told = flow.story(long, tiled(papers.FORWARD, 64, 64))
    text = flow.render(told)
    assert len(text) < 1_000_000
    assert all(len(one["runs"]) <= 4 * 64 * len(one["passes"]) for one in told["schedules"]), "a run to a row, or two"
    assert not re.search(r'(src|href)="(?!data:)|https?://(?!www.w3.org/2000/svg)', text), "it needs nothing else"
    with pytest.raises(ValueError, match=r"tile_q: was 16, which makes 256 tiles .* at least 32"):
        flow.story(long, tiled(papers.FORWARD, 16, 64))


def test_the_command_writes_the_page_and_tells_its_bytes(tmp_path):
    out = tmp_path / "page.html"
    ran = CliRunner().invoke(main, ["flow", "--seq", "256", "--causal", "--out", str(out), "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.output)
    assert [one["name"] for one in found["schedules"]] == list(traffic.SCHEDULES)
    assert 'id="story"' in out.read_text()
    refused = CliRunner().invoke(main, ["flow", "--schedule", "fastest", "--out", str(out)])
    assert refused.exit_code == 1 and "FILE.py:NAME" in refused.output
    for options, schedules in (
        (["--decode", "--lengths", "100,300"], ["standard", "q_outer", "split_kv"]),
        (["--lengths", "100,30x90"], list(traffic.SCHEDULES)),
        (["--mask", f"{EXAMPLES}/own_mask.py:BLOCKS"], list(traffic.SCHEDULES)),
    ):
        ran = CliRunner().invoke(main, ["flow", *options, "--out", str(out), "--json"])
        assert ran.exit_code == 0, ran.output
        assert [one["name"] for one in json.loads(ran.output)["schedules"]] == schedules
    for options, word in (
        (["--lengths", "100", "--batch", "2"], "--lengths names every sequence"),
        (["--lengths", "1,x"], "QUERIESxKEYS"),
        (["--decode", "--lengths", "2x5"], "keys in each cache"),
        (["--mask", "nowhere.py:MINE"], "FILE.py:NAME with a file that exists"),
        (["--mask", f"{EXAMPLES}/own_mask.py:MINE"], "no such name"),
        (["--case", "Llama-3-8B", "--lengths", "5"], "--case names the whole problem"),
        (["--lengths", "100,200", "--schedule", "split_kv"], "shares keys out"),
    ):
        refused = CliRunner().invoke(main, ["flow", *options, "--out", str(out)])
        assert refused.exit_code in (1, 2) and word in " ".join(refused.output.split()), refused.output


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


@pytest.mark.parametrize("known", [papers.FORWARD, papers.BACKWARD], ids=["forward", "backward"])
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


@pytest.mark.parametrize("posed", [decode, packed, masked, cut])
def test_every_form_counts_as_the_model_does(browser, tmp_path, posed):
    p, asked, given = posed()
    told, walked = flow.story(p, asked, **given), steps_of(p, asked, **given)
    file = tmp_path / "flow.html"
    file.write_text(flow.render(told), encoding="utf-8")
    page, said = opened(browser, file)
    last = max(one["steps"] for one in told["schedules"]) - 1
    for step in range(0, last + 1, 3):
        page.evaluate(f"show({step})")
        assert shown(page) == so_far(walked, step), step
    page.keyboard.press("End")
    assert shown(page) == so_far(walked, last)
    assert said == []


@pytest.mark.parametrize("posed", [None, decode, packed, masked, cut])
def test_every_step_of_a_small_problem_is_drawn_without_an_error(browser, tmp_path, posed):
    p, asked, given = posed() if posed else (problem(100, 70, mask=Window(30, 0)), tiled(papers.FORWARD), {})
    file = tmp_path / "flow.html"
    file.write_text(flow.render(flow.story(p, asked, **given)), encoding="utf-8")
    page, said = opened(browser, file)
    drawn = page.evaluate("""() => { const found = [];
        for (let n = 0; n < LAST; n++) { show(n); found.push(document.getElementById("panels").innerHTML); }
        return found; }""")
    assert len(set(drawn)) == len(drawn), "every step looks different"
    assert not any("NaN" in one or "undefined" in one for one in drawn)
    assert said == []


def test_results_of_cut_tiles_are_there_when_they_are_merged(browser, tmp_path):
    p, asked, _ = cut()
    file = tmp_path / "flow.html"
    file.write_text(flow.render(flow.story(p, asked)), encoding="utf-8")
    page, said = opened(browser, file)
    steps = list(loops.walk(p, asked[0]))
    forward = max(n for n, step in enumerate(steps) if step.number == 0)
    wholes = next(n for n, step in enumerate(steps) if step.kind == "end" and step.q_tile == 3)

    def there(name, step):
        return page.evaluate(f"present(schedules[0], schedules[0].names.{name}, schedules[0].steps[{step}]).rows")

    assert there("out", wholes) == there("out", forward) == pytest.approx(4 / 12), "whole tiles leave theirs at once"
    assert there("part", forward) == there("part", len(steps) - 1) == 1 > there("part", wholes)
    assert there("out", len(steps) - 1) == 1
    assert said == []
