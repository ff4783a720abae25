"""Other implementations: OpenVINO's ScaledDotProductAttention and ONNX Runtime's contributed attention operators on a
CPU; torch's own kernels each by itself, and FlashAttention-3 and -4, on a GPU.

The first two get torch's thread count, the same values as everybody else, and read and write the same kind of memory
without copies; they write into a result they are given, where torch and attnworks allocate one. Prefill only. Optional:
the extra ``peers``."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from attnworks.masks import Bounds
from attnworks.problem import Problem
from attnworks.workbench.providers import Bound, Inputs, Provider, Sdpa


class _Peer(Provider):
    modules: tuple[str, ...] = ()
    brings_threads = True

    def refuses(self, problem: Problem) -> str:
        missing = [module for module in self.modules if not find_spec(module)]
        if missing:
            return f"{', '.join(missing)} not installed (pip install 'attnworks[peers]')"
        if problem.form != "dense" or problem.scores:
            return "only measured for plain prefill"
        if problem.mask and not _is_square_causal(problem):
            return f"has no mask {problem.to_json()['mask']} with these lengths"
        return ""


def _is_square_causal(problem: Problem) -> bool:
    """Causal with as many queries as keys, where all alignments agree."""
    terms = [term for term in problem.mask if isinstance(term, Bounds)]
    return (
        len(problem.mask) == len(terms) == 1
        and (terms[0].left, terms[0].right) == (None, 0)
        and problem.seq_q == problem.seq_kv
    )


# ---- OpenVINO --------------------------------------------------------------------------------------------------------


class OpenVino(_Peer):
    """ScaledDotProductAttention-13 alone in a model, compiled for latency; products in bf16 or fp16 where the CPU has
    them and the inputs are that, else in fp32."""

    name = "openvino"
    modules = ("openvino",)

    def form(self, problem: Problem) -> str:
        causal = ", causal=True" if problem.mask else ""
        return f"opset13.scaled_dot_product_attention(q, k, v, scale=scale{causal}), {_precision(problem.dtype)}"

    def refuses(self, problem: Problem) -> str:
        if reason := super().refuses(problem):
            return reason
        return "takes no shared KV heads" if problem.group > 1 else ""

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        request = _openvino_model(problem, torch.get_num_threads()).create_infer_request()
        out = torch.empty(*inputs.q.shape[:3], problem.head_dim_v, dtype=problem.dtype)
        for index, tensor in enumerate(inputs):
            request.set_input_tensor(index, _openvino_view(tensor))
        request.set_output_tensor(0, _openvino_view(out))

        def run() -> Tensor:
            request.infer()
            return out

        return Bound(run, lambda result: result)


@cache
def _openvino_core() -> Any:
    import openvino

    return openvino.Core()


def _precision(dtype: torch.dtype) -> str:
    """The precision of the products: the inputs' own where the CPU is said to gain from it."""
    name = {torch.bfloat16: "bf16", torch.float16: "f16"}.get(dtype, "f32")
    has = {"bf16": "BF16", "f16": "FP16", "f32": "FP32"}[name] in _openvino_core().get_property(
        "CPU", "OPTIMIZATION_CAPABILITIES"
    )
    return name if has else "f32"


def _openvino_type(dtype: torch.dtype) -> Any:
    import openvino

    types = {torch.float32: openvino.Type.f32, torch.bfloat16: openvino.Type.bf16, torch.float16: openvino.Type.f16}
    return types[dtype]


def _openvino_view(tensor: Tensor) -> Any:
    """The tensor's memory as OpenVINO's; numpy has no bf16, so 16-bit types pass as integers with their type beside."""
    import openvino

    array = tensor.numpy() if tensor.dtype == torch.float32 else tensor.view(torch.int16).numpy()
    return openvino.Tensor(array, openvino.Shape(list(tensor.shape)), _openvino_type(tensor.dtype))


@cache
def _openvino_model(problem: Problem, threads: int) -> Any:
    import numpy
    import openvino
    from openvino import opset13

    p, element = problem, _openvino_type(problem.dtype)
    shapes = (
        [p.batch, p.heads_q, p.seq_q, p.head_dim],
        [p.batch, p.heads_kv, p.seq_kv, p.head_dim],
        [p.batch, p.heads_kv, p.seq_kv, p.head_dim_v],
    )
    operands = [opset13.parameter(shape, element) for shape in shapes]
    scale = opset13.convert(opset13.constant(numpy.float32(p.scale)), element.get_type_name())
    # Without a mask the operator wants one before the scale all the same: a zero that broadcasts.
    no_mask = opset13.convert(opset13.constant(numpy.float32(0)), element.get_type_name())
    node = opset13.scaled_dot_product_attention(*operands, no_mask, scale, causal=bool(p.mask))
    settings = {
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": _precision(p.dtype),
    }
    return _openvino_core().compile_model(openvino.Model([node], operands), "CPU", settings)


# ---- ONNX Runtime ----------------------------------------------------------------------------------------------------


class OnnxRuntime(_Peer):
    """com.microsoft.MultiHeadAttention, or GroupQueryAttention (which is causal) where it is the faster: causal
    problems. Inputs in its own layout (batch, rows, heads x dim)."""

    name = "onnxruntime"
    modules = ("onnxruntime", "onnx")

    def form(self, problem: Problem) -> str:
        return f"com.microsoft.{'GroupQueryAttention' if problem.mask else 'MultiHeadAttention'}(q, k, v), IO binding"

    def refuses(self, problem: Problem) -> str:
        if reason := super().refuses(problem):
            return reason
        if problem.dtype not in (torch.float32, torch.float16):
            return f"has no {problem.dtype}"
        if problem.mask and problem.head_dim != problem.head_dim_v:
            return "GroupQueryAttention wants head_dim_v = head_dim"
        return "MultiHeadAttention takes no shared KV heads" if problem.group > 1 and not problem.mask else ""

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        import onnxruntime

        session = _onnx_session(problem, torch.get_num_threads())
        binding = session.io_binding()
        for name, tensor in zip("qkv", inputs, strict=True):
            rows = tensor.transpose(1, 2).reshape(problem.batch, tensor.shape[2], -1)
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(rows.numpy()))
        for name, tensor in _onnx_lengths(problem).items():
            binding.bind_ortvalue_input(name, onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy()))
        results = {name: torch.empty(shape, dtype=problem.dtype) for name, shape in _onnx_results(problem).items()}
        for name, tensor in results.items():
            binding.bind_ortvalue_output(name, onnxruntime.OrtValue.ortvalue_from_numpy(tensor.numpy()))
        out = results["out"]

        def run() -> Tensor:
            session.run_with_iobinding(binding)
            return out

        shape = (problem.batch, problem.seq_q, problem.heads_q, problem.head_dim_v)
        return Bound(run, lambda result: result.view(shape).transpose(1, 2))


def _onnx_lengths(problem: Problem) -> dict[str, Tensor]:
    """GroupQueryAttention's lengths: keys of each sequence less one, and the longest sequence."""
    if not problem.mask:
        return {}
    lengths = torch.full((problem.batch,), problem.seq_kv - 1, dtype=torch.int32)
    return {"seqlens_k": lengths, "total_sequence_length": torch.tensor(problem.seq_kv, dtype=torch.int32)}


def _onnx_results(problem: Problem) -> dict[str, list[int]]:
    """Shapes of the results. GroupQueryAttention writes the cache as well."""
    p = problem
    shapes = {"out": [p.batch, p.seq_q, p.heads_q * p.head_dim_v]}
    if p.mask:
        shapes |= {name: [p.batch, p.heads_kv, p.seq_kv, p.head_dim] for name in ("present_key", "present_value")}
    return shapes


@cache
def _onnx_session(problem: Problem, threads: int) -> Any:
    import onnxruntime
    from onnx import TensorProto, helper

    p = problem
    element = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16}[p.dtype]
    widths = {"q": (p.seq_q, p.heads_q * p.head_dim), "k": (p.seq_kv, p.heads_kv * p.head_dim)}
    widths["v"] = (p.seq_kv, p.heads_kv * p.head_dim_v)
    value: Callable[..., Any] = helper.make_tensor_value_info
    inputs = [value(name, element, [p.batch, rows, width]) for name, (rows, width) in widths.items()]
    inputs += [value(name, TensorProto.INT32, list(x.shape)) for name, x in _onnx_lengths(p).items()]
    results = [value(name, element, shape) for name, shape in _onnx_results(p).items()]
    attributes: dict[str, Any] = {"domain": "com.microsoft", "num_heads": p.heads_q, "scale": p.scale}
    if p.mask:
        operator, names = "GroupQueryAttention", ["q", "k", "v", "", "", "seqlens_k", "total_sequence_length"]
        attributes["kv_num_heads"] = p.heads_kv
    else:
        operator, names = "MultiHeadAttention", ["q", "k", "v"]
    node = helper.make_node(operator, names, list(_onnx_results(p)), **attributes)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "attention", inputs, results)
    # The IR version that goes with opset 21: newer onnx writes one that an older runtime refuses.
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


# ---- on GPUs ---------------------------------------------------------------------------------------------------------


class SdpaBackend(Sdpa):
    """SDPA held to one of torch's GPU kernels."""

    def __init__(self, name: str, backend: str) -> None:
        self.name = name
        self._backend = backend

    def form(self, problem: Problem) -> str:
        return f"sdpa_kernel(SDPBackend.{self._backend}): {super().form(problem)}"

    def refuses(self, problem: Problem) -> str:
        return "one of torch's GPU kernels" if problem.device == "cpu" else super().refuses(problem)

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend, bound = getattr(SDPBackend, self._backend), super().bind(problem, inputs)

        def run() -> Any:
            with sdpa_kernel(backend):
                return bound.run()

        try:
            run()
        except RuntimeError as error:  # torch's way to say that the kernel doesn't take the problem
            raise NotImplementedError(str(error).splitlines()[0]) from error
        return Bound(run, bound.out)


class FlashAttention(Provider):
    """``flash_attn_func`` of FlashAttention-3 or -4, inputs in its own layout (batch, rows, heads, dim)."""

    def __init__(self, name: str, modules: tuple[str, ...]) -> None:
        self.name = name
        self._modules = modules

    def form(self, problem: Problem) -> str:
        return f"{self._modules[0]}.flash_attn_func(q, k, v, causal={bool(problem.mask)})"

    def refuses(self, problem: Problem) -> str:
        if problem.device == "cpu":
            return "runs on NVIDIA GPUs"
        if self._function() is None:
            return f"{' or '.join(self._modules)} is not installed"
        if problem.form != "dense" or problem.scores:
            return "only measured for plain prefill"
        causal = len(problem.mask) == 1 and problem.mask[0] in (Bounds(None, 0, "bottom-right"),)
        return "" if not problem.mask or causal or _is_square_causal(problem) else "only measured full and causal"

    def bind(self, problem: Problem, inputs: Inputs) -> Bound:
        function = self._function()
        assert function is not None
        q, k, v = (x.transpose(1, 2).contiguous() for x in inputs)
        causal, scale = bool(problem.mask), problem.scale

        def out(result: Any) -> Tensor:
            found = result[0] if isinstance(result, tuple) else result
            assert isinstance(found, Tensor)
            return found.transpose(1, 2)

        return Bound(lambda: function(q, k, v, softmax_scale=scale, causal=causal), out)

    def _function(self) -> Callable[..., Any] | None:
        for module in self._modules:
            try:
                found: Callable[..., Any] = importlib.import_module(module).flash_attn_func
            except (ImportError, AttributeError):
                continue
            return found
        return None


PEERS: dict[str, Callable[[], Provider]] = {
    "openvino": OpenVino,
    "onnxruntime": OnnxRuntime,
    "sdpa-flash": lambda: SdpaBackend("sdpa-flash", "FLASH_ATTENTION"),
    "sdpa-cudnn": lambda: SdpaBackend("sdpa-cudnn", "CUDNN_ATTENTION"),
    "sdpa-efficient": lambda: SdpaBackend("sdpa-efficient", "EFFICIENT_ATTENTION"),
    "flash-attn-3": lambda: FlashAttention("flash-attn-3", ("flash_attn_interface", "fa3_fwd_interface")),
    "flash-attn-4": lambda: FlashAttention("flash-attn-4", ("flash_attn.cute",)),
}
