import pickle

from attnworks import UnsupportedError, Verdict


def test_a_verdict_supports_exactly_when_it_has_no_reasons():
    assert Verdict("cpu").supported
    assert str(Verdict("cpu")) == "cpu: supported"
    refusal = Verdict("cpu", ("no fp64", "no softcap"))
    assert not refusal.supported
    assert str(refusal) == "cpu: no fp64; no softcap"


def test_unsupported_lists_every_backend_with_all_reasons():
    error = UnsupportedError([Verdict("a", ("one", "two")), Verdict("b", ("three",))])
    assert isinstance(error, NotImplementedError)
    assert str(error) == "no backend supports this call\n  a: one; two\n  b: three"
    assert str(UnsupportedError([Verdict("a", ("one",))], "a")).startswith("backend='a' does not support this call")


def test_unsupported_crosses_process_boundaries():
    error = UnsupportedError([Verdict("a", ("one",))], "a")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.verdicts, copy.asked) == (str(error), error.verdicts, "a")
