"""A pretend GPU that computes on the CPU under the rules of a CUDA device and its graphs.

    with pretend_cuda() as gpu:
        script.main([])  # `script` was imported before
    print(gpu.launches, gpu.replays, gpu.waits)

A `CudaTensor` says that it is on cuda:0 and keeps its numbers in a CPU tensor, `host`. While `PretendCuda` is active,
it handles every operation of torch:

- An operation on tensors of both devices raises, and so does `numpy()` of a tensor on the device.
- What makes the host wait for the device (`item`, `nonzero`, a mask as index, copies between the two) is counted by
  name and line, and raises inside a capture.
- A capture computes nothing: results are NaN (integers 0), memory is unchanged, and no random number is drawn. A replay
  runs the operations on the memory and with the numbers of the capture. It raises if only graphs hold some of that
  memory, which torch would have freed by then.

Not simulated: the order of streams, the allocator, random numbers of the device (the CPU's generator is used), autocast
lists for CUDA, rounding and determinism of kernels, compiled code, other threads and processes, and copies from pinned
memory. C++ code takes a `CudaTensor` for a CPU tensor: `zeros_like(x, device="cpu")` stays on the device, and
`parameter.data = x` does not work.
"""

import contextlib
import functools
import sys
import weakref
from collections import Counter
from itertools import compress
from pathlib import Path
from unittest import mock

import torch
import torch._dynamo  # imported first, because it inspects the functions that are patched here
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _foreach_utils
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode

CUDA = torch.device("cuda", 0)
HOLE = torch.empty(0)  # stands for a tensor among the arguments of an operation
COPY, TO_COPY = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default
# What the host needs before it can go on: a number, or a shape that depends on the data
WAITING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "multinomial", "bincount"}
WAITING |= {"_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}
OWN_FILES = (str(Path(torch.__file__).parent), contextlib.__file__, __file__)


class CudaTensor(torch.Tensor):
    """A tensor on cuda:0 whose numbers are in the CPU tensor `host`."""

    @staticmethod
    def __new__(cls, host: torch.Tensor):
        with torch.inference_mode(False):  # in which a wrapper and its views would not fit together
            tensor = torch.Tensor._make_wrapper_subclass(
                cls, host.shape, strides=host.stride(), storage_offset=host.storage_offset(), dtype=host.dtype
            )
        tensor.host = host
        return tensor

    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_cpu = property(lambda self: False)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func}: the pretend GPU is gone")

    def cpu(self) -> torch.Tensor:
        return self.to("cpu")

    def tolist(self) -> list:
        return self.cpu().tolist()

    def new_tensor(self, data) -> torch.Tensor:
        return torch.tensor(data, dtype=self.dtype, device=CUDA)

    def numpy(self, **_):
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __reduce_ex__(self, protocol):
        return self.cpu().__reduce_ex__(protocol)


def get_leaves(x) -> list:
    """Flatten lists of lists; [x] if `x` is no list."""
    if not isinstance(x, (list, tuple)):
        return [x]
    return [leaf for item in x for leaf in get_leaves(item)]


def map_tensors(fn, x):
    """Apply `fn` to a tensor, or to each in lists of lists."""
    if isinstance(x, torch.Tensor):
        return fn(x)
    return [map_tensors(fn, item) for item in x] if isinstance(x, (list, tuple)) else x


def get_host(x: torch.Tensor) -> torch.Tensor:
    """Return the CPU tensor that holds the numbers."""
    return x.host if isinstance(x, CudaTensor) else x


@functools.cache
def is_view(func) -> bool:
    """Whether an operation returns views of its arguments."""
    return any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)


def get_storage(x: torch.Tensor) -> int:
    """Return a number that identifies the memory that tensors share."""
    return x.untyped_storage()._cdata


def copy_memory(x: torch.Tensor) -> torch.Tensor:
    """Return the same view of a copy of its memory."""
    return x.new_empty(0).set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())


def fill_unknown(x: torch.Tensor) -> None:
    """Mark memory that holds no result: NaN if the type has it, so that its use shows."""
    x.fill_(float("nan") if x.is_floating_point() else 0)


def is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors agree to the last bit, NaN or not."""
    return torch.equal(*(z.contiguous().flatten().view(torch.uint8) for z in (x, y)))


def find_caller() -> str:
    """Return the file and line that run now, outside torch and this module."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(OWN_FILES):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class Stream:
    """A stream, which has no effect, because every operation runs at once."""

    def __init__(self, gpu):
        self.gpu = gpu

    def is_capturing(self) -> bool:
        return self.gpu.graph is not None

    def wait_stream(self, other) -> None:
        pass


class Graph:
    """A torch.cuda.CUDAGraph: operations with the memory that they read and write."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.nodes = []  # (operation as a function of its tensors, the tensors, memory of each result or None)
        self.made: list[torch.Tensor] = []  # memory of its own
        self.held = Counter()  # by memory that is not its own: how many of its tensors are views of it
        gpu.graphs.add(self)

    def add(self, call, tensors: list[torch.Tensor], results: list) -> None:
        """Record an operation, or None with the memory that it takes; numbers of the host are frozen."""
        for x in results:
            if x is not None:
                fill_unknown(x)
                self.made.append(x)
        operands = [x.host.detach() if isinstance(x, CudaTensor) else x.clone() for x in tensors]
        if call is not None:
            self.nodes.append((call, operands, results))
            on_device = [isinstance(x, CudaTensor) for x in tensors]
            self.held.update(get_storage(x) for x in compress(operands, on_device))

    def end_capture(self) -> None:
        """Find which memory was there before."""
        for x in self.made:
            self.held.pop(get_storage(x), None)

    def replay(self) -> None:
        """Run all operations again; raise if only graphs hold memory that they need."""
        self.gpu.launches += 1
        self.gpu.replays += 1
        for storage in self.held:
            num_views = torch._C._storage_Use_Count(storage) - 1  # without that of the call itself
            if num_views == sum(graph.held[storage] for graph in self.gpu.graphs):
                raise RuntimeError("a graph is replayed whose memory has been freed since it was recorded")
        with torch.inference_mode(), torch._C._DisableTorchDispatch():
            for call, operands, results in self.nodes:
                for memory, result in zip(results, get_leaves(call(operands)), strict=True):
                    if memory is not None:
                        memory.copy_(result)


class PretendCuda(TorchDispatchMode):
    """The device: it counts launches and waits, and records graphs."""

    def __init__(self):
        super().__init__()
        self.launches = 0  # of operations and of graphs
        self.replays = 0  # of graphs
        self.waits: Counter[str] = Counter()  # of the host for the device: "what at file:line"
        self.graphs = weakref.WeakSet()
        self.graph: Graph | None = None  # the graph that is being recorded
        self.default_stream = self.stream = Stream(self)

    def wait(self, what: str) -> None:
        """Count that the host waits for the device; raise inside a capture."""
        if self.graph is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what} at {find_caller()}")
        self.waits[f"{what} at {find_caller()}"] += 1

    def set_stream(self, stream: Stream) -> None:
        """Replace torch.cuda.set_stream."""
        self.stream = stream

    @contextlib.contextmanager
    def capture(self, graph: Graph, stream: Stream | None = None):
        """Replace torch.cuda.graph."""
        if stream is self.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self.wait("torch.cuda.graph")
        rng_state = torch.get_rng_state()
        self.graph = graph
        try:
            yield
        finally:
            self.graph = None
            torch.set_rng_state(rng_state)
        graph.end_capture()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = get_leaves([args, *kwargs.values()])
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        is_here = any(isinstance(x, CudaTensor) for x in tensors)
        is_asked_for = any(isinstance(x, torch.device) and x.type == "cuda" for x in given)
        if not is_here and not is_asked_for:
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and func._can_decompose():  # which autograd does otherwise
            with self:
                return func.decompose(*args, **kwargs)
        if func is TO_COPY and not is_here:
            with self:
                return torch.empty_like(args[0], dtype=kwargs.get("dtype"), device=CUDA).copy_(args[0])
        if func is COPY and not all(isinstance(x, CudaTensor) for x in tensors):
            return self.transfer(*args[:2])
        if is_here:
            self.check(func, args, tensors)
        args = map_tensors(lambda _: HOLE, args)
        kwargs = {name: map_tensors(lambda _: HOLE, x) for name, x in kwargs.items() if name != "device"}
        return self.execute(func, args, kwargs, tensors)

    def transfer(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Compute `target.copy_(source)` between host and device."""
        self.wait("copy to the device" if isinstance(target, CudaTensor) else "copy to the host")
        self.launches += 1
        COPY(get_host(target), get_host(source))
        return target

    def check(self, func, args, tensors: list[torch.Tensor]) -> None:
        """Let the host wait where an operation makes it, and refuse tensors of both devices."""
        name = func.overloadpacket.__name__
        if name in INDEXING:
            indices = [x for x in args[1] if x is not None]
            values = list(args[2:3])
            is_fill = len(values) == 1 and not isinstance(
                values[0], CudaTensor
            )  # no wait to fill by a number
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices) and not is_fill:
                self.wait("a mask as index")
            if not all(isinstance(x, CudaTensor) for x in indices):
                self.wait("an index on the host")
            tensors = [args[0], *values]
        elif name in WAITING:
            self.wait(name.strip("_"))
        written = [x for x, spec in zip(args, func._schema.arguments, strict=False) if spec.is_write]
        for x in tensors:
            if not isinstance(x, CudaTensor) and (x.dim() > 0 or any(x is y for y in written)):
                both = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu"
                raise RuntimeError(f"{both}: {name} at {find_caller()}")

    def execute(self, func, args, kwargs, tensors: list[torch.Tensor]):
        """Run an operation, with `tensors` in the holes of its arguments, or record it in the graph."""

        def call(tensors):
            rest = iter(tensors)
            filled = map_tensors(lambda _: next(rest), [args, *kwargs.values()])
            return func(*filled[0], **dict(zip(kwargs, filled[1:], strict=True)))

        hosts = [get_host(x) for x in tensors]
        known = {id(host): x for host, x in zip(hosts, tensors, strict=True)}
        is_launched = not is_view(func) and "empty" not in func.name()
        if self.graph is None or is_view(func):
            self.launches += is_launched
            results = call(hosts)
        else:  # run for the shapes of the results, where it does no harm
            copies = [copy_memory(x) for x in hosts]
            known |= {id(copy): x for copy, x in zip(copies, tensors, strict=True)}
            results = call(copies)
            leaves = get_leaves(results)
            made = [x if isinstance(x, torch.Tensor) and id(x) not in known else None for x in leaves]
            self.graph.add(call if is_launched else None, tensors, made)
        return map_tensors(lambda x: known[id(x)] if id(x) in known else CudaTensor(x), results)


TO = torch.Tensor.to
GROUP_TENSORS = torch._C._group_tensors_by_device_and_dtype


def move(tensor, *args, **kwargs):
    """Tensor.to, from and to either device."""
    if args and isinstance(args[0], torch.Tensor):
        args = args[0].device, args[0].dtype, *args[1:]
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    dtype = dtype or tensor.dtype
    is_here = isinstance(tensor, CudaTensor)
    if is_here and device is not None and device.type == "cpu":
        return torch.empty_like(tensor.host, dtype=dtype).copy_(tensor)
    if is_here or device is None or device.type == "cpu":
        return TO(tensor, dtype, copy=kwargs.get("copy", False))
    return TO(tensor, CUDA, dtype)


def is_inside_with_cuda() -> bool:
    """Whether new tensors are made on the GPU by default, as in `with torch.device("cuda"):`."""
    contexts = [x for x in _get_current_function_mode_stack() if isinstance(x, DeviceContext)]
    return bool(contexts) and contexts[-1].device.type == "cuda"


def make_and_send(make):
    """torch.tensor or torch.as_tensor, in two steps, as they look for a real GPU themselves."""

    def make_here(*args, device=None, **kwargs):
        if device is None and is_inside_with_cuda():
            with torch.device("cpu"):
                return make(*args, **kwargs).to(CUDA)
        made = make(*args, **kwargs)
        return made if device is None else made.detach().to(device).requires_grad_(made.requires_grad)

    return make_here


def group_tensors(*args):
    """How torch groups tensors by device and type for its fused operations; it takes them to be on the CPU."""
    groups = GROUP_TENSORS(*args).items()
    return {(CUDA if isinstance(x[0][0][0], CudaTensor) else cpu, dtype): x for (cpu, dtype), x in groups}


@contextlib.contextmanager
def pretend_cuda():
    """Give torch one CUDA device, a `PretendCuda`, until the end of the context."""
    if torch.cuda.is_available():
        torch.cuda.init()  # else torch never initializes the real device, because of the pretended start
    gpu, autocast = PretendCuda(), torch.autocast
    cuda = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "synchronize": lambda *_: gpu.wait("synchronize"),
        "manual_seed_all": lambda _: None,
        "Stream": lambda *_: Stream(gpu),
        "current_stream": lambda *_: gpu.stream,
        "set_stream": gpu.set_stream,
        "stream": lambda _: contextlib.nullcontext(),
        "CUDAGraph": lambda: Graph(gpu),
        "graph": gpu.capture,
        "is_current_stream_capturing": lambda: gpu.graph is not None,
    }
    accelerator = {"current_accelerator": lambda **_: CUDA, "current_stream": lambda *_: gpu.stream}
    in_torch = {
        "tensor": make_and_send(torch.tensor),
        "as_tensor": make_and_send(torch.as_tensor),
        "autocast": lambda kind, *args, **kwargs: autocast("cpu", *args, **kwargs),
    }
    foreach_types = [*_foreach_utils._foreach_supported_types, CudaTensor]
    has_mkldnn = torch._C._get_mkldnn_enabled()
    overwrites_parameters = torch.__future__.get_overwrite_module_params_on_conversion()
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.multiple(torch, **in_torch),
        mock.patch.multiple(torch.Tensor, to=move, cuda=lambda x: x.to(CUDA)),
        mock.patch.multiple(torch.accelerator, **accelerator),
        mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", group_tensors),
        mock.patch.object(_foreach_utils, "_foreach_supported_types", foreach_types),
    ):
        torch._C._set_mkldnn_enabled(False)  # its LSTM keeps memory that no replay finds
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        try:
            with gpu:
                yield gpu
        finally:
            torch._C._set_mkldnn_enabled(has_mkldnn)
            torch.__future__.set_overwrite_module_params_on_conversion(overwrites_parameters)
