"""The report: one page that is whole, well formed, needs nothing from outside and shows what there is to see."""

import html.parser
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from attnworks.workbench import report, summary
from attnworks.workbench.cli import verdicts
from attnworks.workbench.cli.verify import verify as command
from attnworks.workbench.hand import HAND
from attnworks.workbench.mutants import Mutant
from attnworks.workbench.page import number, percent
from attnworks.workbench.verify import Result, verify

SWEPT = "sweep: varlen, q 17, kv 33, heads 6/2, dim 192/128, bf16, causal, sink, gapped, rising maximum"
CASES = ["hand: *", "stress: normal, bf16", "size: 7", SWEPT]
VOID = {"meta", "br", "link", "img", "input", "hr"}


class Structure(html.parser.HTMLParser):
    """Checks that tags are balanced, and keeps what the page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.ids: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
                self.references.append(value or "")
            if name == "id":
                self.ids.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page_of(*subjects: Mutant) -> tuple[list[Result], str]:
    results = verify(subjects=subjects, cases=CASES)
    coverage = summary.coverage(subjects, results)
    return results, report.render(results, report.Run("attnworks verify --quick", 0, 2.0, 61.0, "2026-01-02"), coverage)


@pytest.fixture(scope="module")
def right() -> tuple[list[Result], str]:
    return page_of(Mutant())


@pytest.fixture(scope="module")
def wrong() -> tuple[list[Result], str]:
    return page_of(Mutant(), Mutant("scale missing"))


def parsed(page: str) -> Structure:
    structure = Structure()
    structure.feed(page)
    structure.close()
    assert structure.open == []
    return structure


def test_the_page_is_well_formed_and_alone(right: tuple[list[Result], str], wrong: tuple[list[Result], str]) -> None:
    for _, page in (right, wrong):
        structure = parsed(page)
        assert len(structure.ids) == len(set(structure.ids))
        # Whatever is referred to is in the page itself.
        assert all(reference.startswith("#") and reference[1:] in structure.ids for reference in structure.references)
        assert "<script" not in page and "@import" not in page
        assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_every_plot_is_svg_in_the_page_s_colours(right: tuple[list[Result], str]) -> None:
    plots = re.findall(r"<svg.*?</svg>", right[1], flags=re.DOTALL)
    assert len(plots) == 4  # the comparison, by dtype, by length, by inputs
    for plot in plots:
        ElementTree.fromstring(plot)
        assert "var(--accent)" in plot and "var(--text)" in plot
        assert not re.search(r"#0[1-6]0[1-6]0[1-6]", plot)
    assert right[1].count("var(--bad)") > 2  # the line at the budget


def test_the_verdict_comes_first(right: tuple[list[Result], str], wrong: tuple[list[Result], str]) -> None:
    passed = sum(result.status == "passed" for result in right[0])
    assert re.search(rf"<h1[^>]*>\s*All {passed} checks passed", right[1])
    failed = [result for result in wrong[0] if result.status == "failed"]
    assert re.search(rf"<h1[^>]*>\s*{len(failed)} of \d+ checks failed", wrong[1])
    assert 'id="failures"' in wrong[1] and 'id="failures"' not in right[1]
    text = " ".join(parsed(wrong[1]).text)
    assert all(result.case.name in text and result.message in text for result in failed)


def test_numbers_of_hand_cases_are_written_out(right: tuple[list[Result], str]) -> None:
    text = " ".join(parsed(right[1]).text)
    for hand in HAND:
        assert hand.out.replace("|", " | ") in text and hand.dq.replace("|", " | ") in text
    assert "0.1818182, 1.727273; 0.6666667" in text  # "full": 2/11, 19/11; 2/3, as wanted and as got
    assert text.count("0.1818182, 1.727273; 0.6666667") == 2
    assert "✗" not in text


def test_a_wrong_number_of_a_hand_case_is_marked(wrong: tuple[list[Result], str]) -> None:
    assert "✗" in " ".join(parsed(wrong[1]).text)


def test_everything_else_that_was_promised(right: tuple[list[Result], str]) -> None:
    results, page = right
    text = " ".join(parsed(page).text)
    for wanted in (
        "yardstick",
        "eager",
        "rising maximum",
        "Coverage of the sweep",
        "torch",
        "seed 0",
        "budget of 2.0 min",
    ):
        assert wanted in text, wanted
    (covered,) = summary.coverage([Mutant()], results)
    assert covered.cases == 1 and covered.pairs == 91 and f"{covered.legal}" in text
    largest = max(summary.tightest(m).share for _, m in summary.measures(results))
    assert percent(largest) in text


def test_text_is_escaped() -> None:
    results = verify(subjects=[Mutant("scale missing")], cases=["hand: full"])
    broken = [Result("<b>me</b>", r.case, r.layer, r.check, r.status, r.measures, "1 < 2 & more") for r in results]
    page = report.render(broken, report.Run("attnworks verify '<x>'"))
    assert "<b>me</b>" not in page and "&lt;b&gt;me&lt;/b&gt;" in page and "1 &lt; 2 &amp; more" in page


def test_a_run_of_nothing_has_a_page() -> None:
    assert "Nothing was checked" in report.render([], report.Run())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.234e-7, "1.2e-7"),
        (0.5, "0.5"),
        (float("inf"), "∞"),
        (float("nan"), "–"),
        (12345.0, "1.2e4"),
        (4500.0, "4.5e3"),
    ],
)
def test_numbers_read_well(value: float, text: str) -> None:
    assert number(value) == text


def test_the_command_writes_it_and_lists_coverage(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    arguments = ["--backend", "reference", "--case", "hand: full", "--case", SWEPT, "--report", str(path)]
    result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 0, result.output
    assert parsed(path.read_text(encoding="utf-8")).ids
    assert "Covered by the sweep" in result.output and "all passed" in result.output


def test_the_terminal_reads_well_at_80_columns(
    wrong: tuple[list[Result], str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    verdicts.print_errors(wrong[0], wide=False)
    verdicts.print_distribution(wrong[0])
    verdicts.print_coverage(summary.coverage([Mutant()], wrong[0]))
    verdicts.print_totals(wrong[0])
    verdicts.print_failures([])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    # No table is squeezed: each row of errors is one line.
    assert any(re.match(r"fp32 +out +\S+ +\S+ +\d+ % +\S+ +\S+ +\S+$", line) for line in lines)
    assert lines[-1] == "all passed"


def test_plots_and_templates_load_only_for_a_report() -> None:
    code = "import sys; import attnworks.workbench.cli.verify; print({'jinja2', 'matplotlib'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "set()"
