import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import attnworks
from attnworks import ALiBi, Causal, Plan, Softcap, Window, dispatch, masks, prepared, scores, tuned
from attnworks.backends import cuda, reference, triton
from attnworks.hardware import load
from attnworks.tuned import Row
from helpers import problem_of

H200 = load("h200-sxm")
PLAN = Plan("triton", "q_outer", 128, 64, warps=8, stages=3)
CURRENT = tuned.kernels_hash(triton.KERNELS)
ROW = Row(PLAN, 1.25, CURRENT, "580.1", "triton 3.6.0", "0123abc")


def gpu_problem(batch=2, heads_q=16, heads_kv=16, seq=4096, mask=None, modifiers=()):
    q, k = (torch.empty(batch, heads, seq, 64, dtype=torch.bfloat16) for heads in (heads_q, heads_kv))
    posed = replace(problem_of(q, k, k), device="cuda:0")
    return replace(posed, mask=masks.split(mask)[0], scores=scores.split(modifiers)[0])


PROBLEM = gpu_problem()
KEY = tuned.key_of(PROBLEM, H200, "triton")


@pytest.fixture(autouse=True)
def folders(tmp_path, monkeypatch):
    """(the user's, the shipped one), both empty; and an H200 that is here."""
    user, shipped = tmp_path / "user", tmp_path / "shipped"
    user.mkdir()
    shipped.mkdir()
    monkeypatch.setattr(tuned, "_shipped_folder", lambda: shipped)
    monkeypatch.setattr(dispatch, "detect", lambda device: H200)
    attnworks.use_plans(user)
    yield user, shipped
    attnworks.use_plans(None)


def put(folder: Path, row: Row, key: str = KEY) -> Path:
    path = folder / "nvidia-h200-sxm.json"
    tuned.write(path, H200.name, {key: row})
    return path


def test_a_measured_row_decides_and_says_so(folders):
    table = dispatch.explain(PROBLEM, "triton")
    assert table.backend == "triton" and table.plan != PLAN and table.why == "the backend's own choice"
    put(folders[1], ROW)
    found = dispatch.explain(PROBLEM, "triton")
    assert found.plan == PLAN
    assert found.why == "tuned, 1.25 times as fast as the table's choice (nvidia-h200-sxm.json, 0123abc)"
    assert found.why in str(found) and found.to_json()["why"] == found.why
    assert dispatch.choose(PROBLEM, "triton")[1] == PLAN


def test_the_cuda_backend_takes_a_row_and_splits_the_keys_as_the_problem_asks(folders, monkeypatch):
    monkeypatch.setattr(cuda, "missing", lambda: "")
    plan = Plan("cuda", "q_outer", 192, 96, warps=16, stages=3)
    row = replace(ROW, plan=plan, kernels=tuned.kernels_hash(cuda.KERNELS))

    def explained(posed):
        put(folders[1], row, tuned.key_of(posed, H200, "cuda"))
        return dispatch.explain(posed, "cuda")

    table = dispatch.explain(PROBLEM, "cuda")
    assert table.why == "the backend's own choice" and table.plan != plan
    found = explained(PROBLEM)
    assert found.plan == plan and found.why.startswith("tuned, 1.25 times as fast as the table's choice")
    assert dispatch.explain(replace(PROBLEM, dtype=torch.float16), "cuda").plan == table.plan
    few = gpu_problem(batch=1, heads_q=2, heads_kv=2, seq=16384)
    few = replace(few, seq_q=192)
    found = explained(few)
    assert found.plan == replace(plan, schedule="split_kv", split_kv=1056)
    assert explained(replace(few, seq_kv=2048)).plan.split_kv == 1056
    assert explained(replace(few, seq_kv=2048, batch_invariant=True)).plan == plan
    wave = replace(plan, tile_q=128, tile_kv=144, warps=12, stages=2)
    row = replace(row, plan=wave)
    assert explained(gpu_problem(batch=1, heads_q=17, heads_kv=17, seq=8192)).plan == replace(wave, schedule="stream_k")
    assert dispatch.explain(gpu_problem(batch=33, seq=8192), "cuda").plan == wave, "the last wave is a whole one"
    row = replace(row, plan=plan)
    # One row for all lengths of its kind: each has as many parts as fill the card.
    longest = replace(few, seq_kv=4 * 16384)
    assert tuned.key_of(longest, H200, "cuda") == tuned.key_of(few, H200, "cuda")
    assert dispatch.explain(longest, "cuda").plan == replace(plan, schedule="split_kv", split_kv=1056)


def test_what_a_kernel_must_be_compiled_for_is_in_the_key():
    keys = [
        tuned.key_of(gpu_problem(modifiers=m), H200, "cuda") for m in ((), (Softcap(5.0),), (ALiBi(torch.ones(16)),))
    ]
    assert len(set(keys)) == 3 and keys[1].endswith("softcap") and keys[2].endswith("alibi")


def test_a_given_plan_comes_before_a_measured_one(folders):
    put(folders[1], ROW)
    given = replace(PLAN, tile_kv=32)
    found = dispatch.explain(PROBLEM, plan=given)
    assert (found.plan, found.why) == (given, "given by the caller")


def test_a_row_of_other_kernels_is_a_hint_and_decides_nothing(folders):
    table = dispatch.explain(PROBLEM, "triton").plan
    put(folders[1], replace(ROW, kernels="0" * 16))
    assert dispatch.explain(PROBLEM, "triton").plan == table
    found = tuned.hint(PROBLEM, H200, "triton", triton.KERNELS)
    assert found is not None and found.row.plan == PLAN


def test_a_users_row_overlays_the_shipped_one_unless_it_is_stale(folders):
    user, shipped = folders
    put(shipped, ROW)
    theirs = replace(PLAN, stages=2)
    put(user, replace(ROW, plan=theirs))
    assert dispatch.explain(PROBLEM, "triton").plan == theirs
    put(user, replace(ROW, plan=theirs, kernels="0" * 16))
    assert dispatch.explain(PROBLEM, "triton").plan == PLAN
    attnworks.use_plans(None)


def test_other_problems_keep_the_table(folders):
    put(folders[1], ROW)
    for other in (
        gpu_problem(mask=Causal()), gpu_problem(mask=Window(9, 0)), gpu_problem(seq=1024), gpu_problem(heads_kv=4),
        gpu_problem(modifiers=(Softcap(5.0),)), replace(PROBLEM, dtype=torch.float16), replace(PROBLEM, head_dim_v=32),
    ):  # fmt: skip
        assert dispatch.explain(other, "triton").plan != PLAN, tuned.key_of(other, H200, "triton")
    # Up to the next power of two, and beyond a full device, sizes don't matter.
    for same in (gpu_problem(seq=2049, heads_q=32, heads_kv=32), gpu_problem(batch=3), gpu_problem(seq=4095)):
        assert dispatch.explain(same, "triton").plan == PLAN, tuned.key_of(same, H200, "triton")


def test_a_backend_without_tuned_plans_is_not_looked_up():
    assert tuned.find(PROBLEM, H200, "reference", reference.KERNELS) is None


def test_a_row_that_cannot_run_its_problem_is_an_error_that_names_it(folders):
    path = put(folders[0], replace(ROW, plan=replace(PLAN, tile_q=17)))
    with pytest.raises(ValueError, match=rf"tuned plans {path}, row '{KEY}': plan tile_q: was 17"):
        dispatch.choose(PROBLEM, "triton")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema was 2, must be 1"),
        ({"device": "NVIDIA T4"}, "device was 'NVIDIA T4', must be 'NVIDIA H200 SXM'"),
        ({"rows": {KEY: {"plan": {"backend": "triton"}}}}, "TypeError: .*schedule"),
        ({"rows": {KEY: {"plan": {"backend": "triton", "schedule": "q_outer", "tile_q": -1}}}}, "Plan tile_q: was -1"),
        ({"rows": []}, "AttributeError"),
    ],
)
def test_a_file_that_is_none_is_named(folders, change, message):
    path = put(folders[0], ROW)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    tuned.read.cache_clear()
    with pytest.raises(ValueError, match=rf"^tuned plans {path}: .*{message}"):
        dispatch.choose(PROBLEM, "triton")


def test_writing_keeps_what_it_does_not_replace(folders):
    path = put(folders[0], ROW)
    tuned.write(path, H200.name, {"another": replace(ROW, ratio=2.0)})
    assert tuned.read(path, H200.name) == {KEY: ROW, "another": replace(ROW, ratio=2.0)}
    tuned.write(path, H200.name, {KEY: None})
    assert list(tuned.read(path, H200.name)) == ["another"]
    assert path.read_text().count("\n") == 7


def test_use_plans_takes_a_folder_and_forgets_prepared_calls(folders, tmp_path):
    prepared.CALLS["kept"] = lambda operands: (operands.q, None)
    attnworks.use_plans(folders[0])
    assert not prepared.CALLS
    with pytest.raises(ValueError, match=r"folder: was .*, must be an existing folder"):
        attnworks.use_plans(tmp_path / "none")


def test_without_a_given_folder_it_is_the_users_configuration(tmp_path, monkeypatch):
    attnworks.use_plans(None)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    folder = tuned.users_folder()
    assert folder.name == "plans" and folder.parent.name == "attnworks"


def hash_of(text, folder, suffix):
    path = folder / f"{abs(hash(text))}{suffix}"
    path.write_text(text)
    return tuned.kernels_hash((path,))


def test_the_hash_knows_code_from_words_about_it(tmp_path):
    def hashed(text):
        return hash_of(text, tmp_path, ".py")

    plain = hashed('"""File."""\n\ndef f(x):\n    """What it does."""\n    return x + 1\n')
    assert plain == hashed("def f(x):  # why\n\n    # because\n    return x  +  1\n")
    assert plain != hashed("def f(x):\n    return x + 2\n")
    assert plain != hashed('def f(x):\n    "a" "b"\n    return x + "1"\n')


def test_comments_in_cuda_count_as_little(tmp_path):
    def hashed(text):
        return hash_of(text, tmp_path, ".cuh")

    plain = hashed("#if A  // why\nDEV int f() { return 1 / 2; }\n#endif\n")
    assert plain == hashed("/* what\n   it does */\n#if A\nDEV int f() {\n  return 1 / 2;\n}\n#endif\n")
    assert plain != hashed("#if A\nDEV int f() { return 1 / 3; }\n#endif\n")


def test_of_a_compiled_kernel_every_byte_counts(tmp_path):
    hashes = []
    for number, content in enumerate((b"\x7fELF # 1", b"\x7fELF # 2")):
        path = tmp_path / f"{number}.so"
        path.write_bytes(content)
        hashes.append(tuned.kernels_hash((path,)))
    assert hashes[0] != hashes[1]


def test_shipped_files_are_plans(monkeypatch):
    monkeypatch.undo()
    shipped = Path(attnworks.__file__).parent / "plans"
    for path in shipped.glob("*.json"):
        device = json.loads(path.read_text())["device"]
        assert tuned.file_name(replace(H200, name=device)) == path.name
        assert tuned.read(path, device)
