"""The report of records: what its sentences say, and that the page is whole, small and draws what there is."""

from __future__ import annotations

import base64
import functools
import json
import re
from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from click.testing import CliRunner

from attnworks import Causal, Plan
from attnworks.workbench import findings, records
from attnworks.workbench.cli import main
from attnworks.workbench.history import History
from attnworks.workbench.providers import describe
from browser import chromium, opened
from record_helpers import RECORD

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from attnworks.workbench import record_report

CHECK = {"worst_share_of_bound": 0.125, "largest_error": 1e-6, "rows": 48}
NOISE = (1.0, 1.001, 0.999, 1.0005, 0.9995, 1.0002, 1.0, 1.0003, 0.9998, 1.0001, 1.0, 1.0)


def problem(seq):
    sizes = {"batch": 1, "heads_q": 8, "heads_kv": 2, "seq_q": seq, "seq_kv": seq, "head_dim": 64, "head_dim_v": 64}
    return describe(form="dense", dtype=torch.float32, mask=Causal(), **sizes)


def record(seq, provider, seconds, **changes):
    posed = problem(seq)
    usual = {
        "session": f"n{seq}", "provider": provider, "problem": posed.to_json(), "plan": None, "check": CHECK,
        "seconds": tuple(seconds * x for x in NOISE), "flops": posed.flops(), "modelled_bytes": 10**8,
        "ceilings": {"read_bytes_per_second": 1e10, "flops_per_second": 1e11}, "commit": "aaaaaaa", "notes": (),
    }  # fmt: skip
    return replace(RECORD, **(usual | changes))


def swept(tile, seconds, session="heat", final=False):
    plan = Plan("cpu", "tiled", 64, tile)
    marks = {"sweep": "0123", "begun": "2026-01-01", "final": final}
    name = f"64 x {tile}"
    return record(512, name, seconds, session=session, plan=plan.to_json(), conditions={"threads": 2} | marks)


BENCHED = [
    *(record(512, name, seconds) for name, seconds in (("attnworks", 1.0), ("sdpa", 1.5), ("standard", 1.0))),
    *(record(1024, name, seconds) for name, seconds in (("attnworks", 4.0), ("sdpa", 3.0), ("standard", 9.0))),
]
SWEPT = [
    swept(128, 1.0),
    swept(64, 0.5),
    swept(256, 2.0),
    swept(128, 1.0, "final", True),
    swept(64, 0.8, "final", True),
]
LATER = record(512, "attnworks", 1.2, session="later", when="2026-02-01T00:00:00+00:00", commit="bbbbbbb",
               load={"busy": True})  # fmt: skip
STUDY = [
    record(512, name, seconds, session="study", conditions={"study": name}) for name, seconds in (("a", 2), ("b", 1))
]
EVERYTHING = [*BENCHED, *SWEPT, LATER, *STUDY]


def rendered(found, **options):
    return record_report.render(found, **({"title": "Title & more", "when": "now"} | options))


FLOW = '<p id="inside">tiles</p><script>document.title = "moved"</script>'


@functools.cache
def whole():
    return rendered(EVERYTHING, flow=FLOW)


def test_who_wins_who_loses_and_what_is_undecided_is_said():
    peers = findings.findings(BENCHED)
    assert peers[0] == (
        "attnworks against torch SDPA: faster in 1 of 2 problems, 1.50 (1.50 to 1.50) times as fast; slower in 1, "
        "at worst 0.75 (0.75 to 0.75) times as fast (dense, batch 1, heads 8/2, d 64, float32, causal, N 1024)."
    )
    assert "undecided in 1 (dense, batch 1, heads 8/2, d 64, float32, causal, N 512)" in peers[1]
    assert peers[-1].startswith("All 6 runs passed the check against fp64; the largest error: 0.12 of its bound")


def test_sweeps_commits_and_doubts_are_said():
    told = " ".join(findings.findings([*SWEPT, BENCHED[0], LATER]))
    assert "N 512): 64 x 64 is 1.25 (1.25 to 1.25) times as fast as 64 x 128." in told, "the final counts, not the heat"
    assert "Slower since the commit before: attnworks: dense" in told and "from aaaaaaa to bbbbbbb" in told
    assert "1 of 7 runs were taken while others used the machine" in told
    older = [replace(one, session="older", when="2025-01-01T00:00:00+00:00") for one in STUDY]
    assert len(findings.studies([*STUDY, *older])) == 1 and findings.studies([*older, *STUDY])[0][0].session == "study"
    assert "N 512), relative times: a 1.00, b 0.50; errors up to 1e-06." in findings.findings(STUDY)[0]
    slower, close = (
        [swept(128, 1.0, final=final), swept(64, s, final=final)] for s, final in ((1.6, True), (1.0, False))
    )
    assert (
        "N 512): the backend's choice, 64 x 128, was not beaten; next comes 64 x 64, 0.62"
        in findings.findings(slower)[0]
    )
    assert "N 512; without a final yet): undecided between 64 x 64 and 64 x 128." in findings.findings(close)[0]
    others = [replace(one, plan=one.plan | {"warps": 8}, provider=f"{one.provider}, 8 warps") for one in slower[1:]]
    assert sum(line.startswith("Tiles") for line in findings.findings([*slower, *others])) == 1, (
        "of all warps and stages"
    )
    assert "<td>its choice" in re.sub(r'<td class="n">', "<td>", rendered(SWEPT))


def test_the_page_is_alone_and_every_plot_is_svg():
    page = whole()
    plots = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    assert len(plots) == 6  # case study, lengths, roofline, errors, a heat map, commits
    for plot in plots:
        ElementTree.fromstring(plot)
        assert not re.search(r"#0[1-8]0[1-8]0[1-8]", plot)
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert not re.search(r'(?:src|href)="(?!#|data:)', page) and "<script" not in page
    assert "<title>Title &amp; more</title>" in page and "@media print" in page
    assert set(re.findall(r'<section id="(\w+)"', page)) == {
        "findings", "study", "lengths", "roofline", "errors", "sweeps", "history", "conditions", "flow",
    }  # fmt: skip


def test_the_numbers_lie_beside_the_plots_and_can_be_taken_away():
    page = whole()
    held = re.search(r'download="lengths.json" href="data:application/json;base64,([^"]*)"', page)
    rows = json.loads(base64.b64decode(held[1]))
    assert len(rows) == 6 and rows[0]["N"] == "512"
    losing = next(row for row in rows if row["kernel"] == "torch SDPA" and row["N"] == "1024")
    assert losing["times as fast"] == "0.75 (0.75 to 0.75)" and losing["call"] == RECORD.form
    assert page.count(f"<li>torch SDPA: {RECORD.form}</li>") == 1 and f"<td>{RECORD.form}" not in page


def test_only_what_there_is_has_a_section():
    page = rendered(SWEPT)
    assert 'id="sweeps"' in page
    assert not any(f'id="{name}"' in page for name in ("lengths", "roofline", "history", "study", "flow"))


def test_notes_that_differ_in_numbers_and_steps_of_studies_are_told_together():
    said = ("others used 1.5 cores meanwhile", "others used 12 cores meanwhile", "a flush of 3 did nothing")
    noted = [replace(BENCHED[n], notes=(note,)) for n, note in enumerate(said)]
    steps = [replace(one, plan=Plan("cpu", "tiled", 64, n).to_json()) for n, one in enumerate(STUDY)]
    page = rendered([*noted, *steps])
    assert "<li>others used 12 cores meanwhile (and 1 more like it)</li>" in page
    assert "<li>a flush of 3 did nothing</li>" in page and "1.5 cores" not in page
    held = re.search(r'download="errors.json" href="data:application/json;base64,([^"]*)"', page)
    rows = {row["kernel"]: row["runs"] for row in json.loads(base64.b64decode(held[1]))}
    assert rows == {"attnworks": "1", "torch SDPA": "1", "standard attention": "1", "steps of case studies": "2"}


def test_a_flow_page_is_shown_in_a_frame(tmp_path):
    page = rendered(SWEPT, flow='<svg title="x"></svg>')
    assert 'srcdoc="&lt;svg title=&#34;x&#34;&gt;&lt;/svg&gt;"' in page


def test_a_page_over_two_megabytes_is_refused():
    with pytest.raises(ValueError, match="must be at most 2097152: choose fewer records"):
        rendered(SWEPT, flow="x" * (2 << 20))
    with pytest.raises(ValueError, match="records: were none"):
        rendered([])


def test_the_command_takes_the_history_or_files(tmp_path):
    db, lines, out = tmp_path / "h.db", tmp_path / "r.jsonl", tmp_path / "page.html"
    History(db).add(BENCHED)
    records.save(lines, SWEPT)
    ran = CliRunner().invoke(main, ["report", "--db", str(db), "--out", str(out), "--json", "provider=sdpa"])
    assert ran.exit_code == 0, ran.output
    told = json.loads(ran.stdout)
    assert told["runs"] == 2 and told["bytes"] == len(out.read_bytes()) and told["findings"]
    ran = CliRunner().invoke(main, ["report", "--records", str(lines), "--out", str(out)])
    assert ran.exit_code == 0 and "5 runs" in ran.output and 'id="sweeps"' in out.read_text()
    ran = CliRunner().invoke(main, ["report", "--db", str(tmp_path / "none.db")])
    assert ran.exit_code == 1 and "none.db does not exist" in ran.output
    ran = CliRunner().invoke(main, ["report", "--db", str(db), "provider=nobody"])
    assert ran.exit_code == 1 and "no runs of 'provider=nobody'" in ran.output
    ran = CliRunner().invoke(main, ["report", "--db", str(db), "--out", str(tmp_path / "nowhere" / "page.html")])
    assert ran.exit_code == 1 and "nowhere/page.html: No such file or directory" in ran.output


def test_it_opens_in_chromium_without_a_word_on_the_console(tmp_path):
    path = tmp_path / "page.html"
    path.write_text(whole(), encoding="utf-8")
    with chromium() as browser:
        page, said = opened(browser, path)
        assert page.title() == "Title & more"
        assert page.frame_locator("iframe").locator("#inside").inner_text() == "tiles"
        plots = page.locator("figure svg")
        assert plots.count() == 6 and all(plots.nth(n).bounding_box()["height"] > 50 for n in range(6))
        with page.expect_download() as taken:
            page.locator('a[download="lengths.json"]').click()
        assert len(json.loads(taken.value.path().read_text())) == 6
        page.emulate_media(media="print")
        assert not page.locator("iframe").is_visible() and not page.locator(".download").first.is_visible()
        assert len(page.pdf()) > 10_000
        assert said == []
