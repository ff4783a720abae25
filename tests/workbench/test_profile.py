"""What ncu writes is read right: names, units, launches, and what is missing."""

from __future__ import annotations

import pytest

from attnworks.workbench import profile
from attnworks.workbench.profile import Kernel, ProfilerError, parse, total

HEAD = (
    '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size","Grid Size","Device",'
    '"CC","dram__bytes_read.sum","dram__bytes_write.sum","gpu__time_duration.sum","lts__t_bytes.sum"'
)
BASE = '"","","","","","","","","","","","byte","byte","nsecond","byte"'
SCALED = '"","","","","","","","","","","","Mbyte","Kbyte","usecond","Gbyte"'
WHERE = '"python3","127.0.0.1"'
PLACE = '"1","7","(128, 1, 1)","(2048, 1, 1)","0","9.0"'
OUTPUT = f"""==PROF== Connected to process 4711 (/usr/bin/python3.11)
==PROF== Profiling "forward" - 0: 0%....50%....100% - 1 pass
==PROF== Profiling "combine" - 1 (2/2): 0%....50%....100% - 3 passes
the program's own words, "quoted"
{HEAD}
{BASE}
"0","4711",{WHERE},"forward",{PLACE},"201,326,592","67,108,864","123,456","1,073,741,824"
"1","4711",{WHERE},"void combine<float, 4>(float *, int)",{PLACE},"1024","0","1000","n/a"
==PROF== Disconnected from process 4711
"""


def test_every_launch_is_read_with_its_metrics() -> None:
    first, second = parse(OUTPUT)
    assert first == Kernel(
        "forward",
        {
            profile.DRAM_READ: 201_326_592,
            profile.DRAM_WRITTEN: 67_108_864,
            profile.SECONDS: pytest.approx(123_456e-9),
            profile.L2: 2**30,
        },
        passes=1,
    )
    assert second.passes == 3
    assert second.name == "void combine<float, 4>(float *, int)"
    assert profile.L2 not in second.metrics, "unknown is missing, not 0"
    assert second.metrics[profile.DRAM_WRITTEN] == 0


def test_of_a_whole_page_what_was_asked_for_is_kept_and_how_often_the_kernel_ran() -> None:
    """As ncu 2025.3 writes it, which says nothing of passes elsewhere in its log."""
    head = HEAD.replace('"CC",', '"CC","device__attribute_warp_size","profiler__replayer_passes",')
    base = BASE.replace('"","byte"', '"","","","byte"', 1)
    line = f'"0","1",{WHERE},"k",{PLACE},"32","4","201","67","12","1"'
    (kernel,) = parse("\n".join((head, base, line)), (profile.DRAM_READ, profile.L2))
    assert kernel == Kernel("k", {profile.DRAM_READ: 201.0, profile.L2: 1.0}, passes=4)
    (whole,) = parse("\n".join((head, base, line)))
    assert whole.metrics["device__attribute_warp_size"] == 32


def test_scaled_units_become_base_units() -> None:
    line = f'"0","1",{WHERE},"k",{PLACE},"201.3","67.5","12.5","1.5"'
    (kernel,) = parse("\n".join((HEAD, SCALED, line)))
    assert kernel.metrics == {
        profile.DRAM_READ: pytest.approx(201.3e6),
        profile.DRAM_WRITTEN: pytest.approx(67.5e3),
        profile.SECONDS: pytest.approx(12.5e-6),
        profile.L2: pytest.approx(1.5e9),
    }


@pytest.mark.parametrize("text", ["", "==ERROR== no kernels were profiled\n", HEAD, f"{HEAD}\n{BASE}\n"])
def test_no_table_is_no_kernel(text: str) -> None:
    assert parse(text) == []


def test_a_total_is_known_only_if_every_part_is() -> None:
    kernels = parse(OUTPUT)
    assert total(kernels, profile.DRAM_READ) == 201_326_592 + 1024
    assert total(kernels, profile.L2) is None
    assert total([], profile.L2) is None


def test_calls_end_where_the_caches_are_emptied() -> None:
    names = ["a", "b", "reduce_kernel", "c", "reduce_kernel<4>", "reduce_kernel<1>", "d"]
    found = profile.calls([Kernel(name) for name in names], "reduce_kernel")
    assert [[kernel.name for kernel in call] for call in found] == [names[:3], names[3:6]]
    assert profile.calls([Kernel("a")], "reduce_kernel") == []


FAKE = """#!/bin/sh
while [ "$1" != "--log-file" ]; do shift; done
printf '%s' "$FAKE_TABLE" > "$2"
exit $FAKE_CODE
"""


def test_ncus_table_is_read_from_its_log(tmp_path, monkeypatch) -> None:
    fake_ncu(tmp_path, monkeypatch, OUTPUT, 0)
    assert profile.profile(["true"], (*profile.BYTES, profile.SECONDS)) == parse(OUTPUT)
    assert all(profile.SECONDS not in kernel.metrics for kernel in profile.profile(["true"], iter(profile.BYTES)))


@pytest.mark.parametrize(("table", "code"), [("==ERROR== no permission", 1), ("==ERROR== no permission", 0)])
def test_a_refusal_is_told_in_ncus_words(tmp_path, monkeypatch, table, code) -> None:
    fake_ncu(tmp_path, monkeypatch, table, code)
    with pytest.raises(ProfilerError, match=r"0 kernels(.|\n)*no permission"):
        profile.profile(["true"])


def test_without_ncu_it_says_so(monkeypatch) -> None:
    monkeypatch.setattr(profile, "ncu", lambda: None)
    with pytest.raises(ProfilerError, match="not on the PATH"):
        profile.profile(["true"])


def fake_ncu(tmp_path, monkeypatch, table: str, code: int) -> None:
    program = tmp_path / "ncu"
    program.write_text(FAKE)
    program.chmod(0o755)
    monkeypatch.setattr(profile, "ncu", lambda: str(program))
    monkeypatch.setenv("FAKE_TABLE", table)
    monkeypatch.setenv("FAKE_CODE", str(code))
