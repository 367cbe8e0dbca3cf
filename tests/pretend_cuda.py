"""A pretend GPU that computes on the CPU under the rules of a CUDA device and its graphs.

A `CudaTensor` says that it is on cuda:0 and keeps its numbers in a CPU tensor, `host`. Under `PretendCuda`:

- An operation on tensors of both devices raises, and so does `numpy()` of a tensor on the device.
- What makes the host wait for the device (`item`, `nonzero`, a mask as index, copies between the two) is
  counted, and raises inside a capture.
- A capture computes nothing: results are NaN (integers 0), memory is unchanged, and no random number is
  drawn. A replay runs the operations on the memory and with the numbers of the capture. It raises if only
  graphs hold some of that memory, which torch would have freed by then.

Not simulated: streams, the allocator, random numbers of the device, autocast lists for CUDA, rounding, cuDNN,
compiled code, other threads and processes, and pinned memory. C++ code takes a `CudaTensor` for a CPU tensor:
`zeros_like(x, device="cpu")` stays on the device, and `parameter.data = x` does not work.
"""

import contextlib
import copy
import weakref
from collections import Counter
from types import SimpleNamespace
from unittest import mock

import torch
import torch._dynamo  # imported first, because it inspects the functions that are patched here
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

CUDA = torch.device("cuda", 0)
PROPERTIES = SimpleNamespace(name="pretend GPU", major=9, minor=0)
HOLE = object()  # stands for a tensor among the arguments of an operation
COPY, TO_COPY = torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default
# What the host needs before it can go on: a number, or a shape that depends on the data
WAITING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "multinomial", "bincount"}
WAITING |= {"_unique2", "unique_dim", "unique_consecutive", "repeat_interleave"}
INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


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

    def numpy(self, *, force=False):
        if force:
            return self.detach().cpu().numpy()
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def __reduce_ex__(self, protocol):
        return self.cpu().__reduce_ex__(protocol)

    def __format__(self, spec):
        return format(self.item(), spec)

    def __repr__(self, **_):  # in tests that fail too, when the device is gone
        return f"{self.host!r}"[:-1] + ", device='cuda:0')"


def get_host(x: torch.Tensor) -> torch.Tensor:
    """Return the CPU tensor that holds the numbers."""
    return x.host if isinstance(x, CudaTensor) else x


def is_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors agree to the last bit, NaN or not."""
    return torch.equal(*(z.contiguous().flatten().view(torch.uint8) for z in (x, y)))


class Graph:
    """A torch.cuda.CUDAGraph: operations with the memory that they read and write."""

    def __init__(self, gpu):
        self.gpu = gpu
        # (operation as a function of its tensors, the tensors, memory of each result or None)
        self.nodes = []
        self.own: list[torch.Tensor] = []  # memory that was made in the capture, and stays
        self.held = Counter()  # by memory: how many operands of the graph are views of it
        gpu.graphs.add(self)

    def add(self, call, tensors: list[torch.Tensor], results: list) -> None:
        """Record an operation, or None with the memory that it takes; numbers of the host are frozen."""
        for x in results:
            if x is not None:
                x.fill_(float("nan") if x.is_floating_point() else 0)
                self.own.append(x)
        if call is not None:
            operands = [x.host.detach() if isinstance(x, CudaTensor) else x.clone() for x in tensors]
            self.nodes.append((call, operands, results))
            self.held.update(x.host.untyped_storage()._cdata for x in tensors if isinstance(x, CudaTensor))

    def replay(self) -> None:
        """Run all operations again; raise if only graphs hold memory that they need."""
        self.gpu.replays += 1
        for storage in self.held:
            num_views = torch._C._storage_Use_Count(storage) - 1  # without that of the call itself
            if num_views == sum(graph.held[storage] for graph in self.gpu.graphs):
                raise RuntimeError("a graph is replayed whose memory has been freed since it was recorded")
        with torch.inference_mode(), torch._C._DisableTorchDispatch():
            for call, operands, results in self.nodes:
                for memory, result in zip(results, tree_leaves(call(operands)), strict=True):
                    if memory is not None:
                        memory.copy_(result)


class PretendCuda(TorchDispatchMode):
    """The device: it counts waits, and records graphs."""

    def __init__(self):
        super().__init__()
        self.replays = 0  # of graphs
        self.num_waits = 0  # of the host for the device
        self.graphs = weakref.WeakSet()
        self.graph: Graph | None = None  # the graph that is being recorded
        self.default_stream = self.stream = self.make_stream()

    def make_stream(self, *_):
        """Replace torch.cuda.Stream; a stream has no effect, because every operation runs at once."""
        return SimpleNamespace(wait_stream=lambda other: None, is_capturing=lambda: self.graph is not None)

    def wait(self, what: str) -> None:
        """Count that the host waits for the device; raise inside a capture."""
        if self.graph is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {what}")
        self.num_waits += 1

    @contextlib.contextmanager
    def capture(self, graph: Graph, stream=None):
        """Replace torch.cuda.graph."""
        if stream is self.default_stream:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream")
        self.wait("torch.cuda.graph")
        rng_state, self.graph = torch.get_rng_state(), graph
        try:
            yield
        finally:
            self.graph = None
            torch.set_rng_state(rng_state)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = tree_leaves((args, kwargs))
        tensors = [x for x in given if isinstance(x, torch.Tensor)]
        is_here = any(isinstance(x, CudaTensor) for x in tensors)
        if not is_here and not any(isinstance(x, torch.device) and x.type == "cuda" for x in given):
            return func(*args, **kwargs)
        if torch.is_inference_mode_enabled() and func._can_decompose():  # which autograd does otherwise
            with self:
                return func.decompose(*args, **kwargs)
        if func is TO_COPY and not is_here:
            with self:
                return torch.empty_like(args[0], dtype=kwargs.get("dtype"), device=CUDA).copy_(args[0])
        if func is COPY and not all(isinstance(x, CudaTensor) for x in tensors):
            self.wait("copy to the device" if isinstance(args[0], CudaTensor) else "copy to the host")
            COPY(*map(get_host, tensors))
            return args[0]
        if is_here:
            self.check(func, args, tensors)
        return self.execute(func, args, {name: x for name, x in kwargs.items() if name != "device"}, tensors)

    def check(self, func, args, tensors: list[torch.Tensor]) -> None:
        """Let the host wait where an operation makes it, and refuse tensors of both devices."""
        name = func.overloadpacket.__name__
        if name in INDEXING:
            indices, values = [x for x in args[1] if x is not None], list(args[2:3])
            is_fill = len(values) == 1 and not isinstance(values[0], CudaTensor)
            is_masked = any(x.dtype in (torch.bool, torch.uint8) for x in indices)
            if is_masked != is_fill:  # under a mask a number is filled in; elsewhere it is copied first
                self.wait("a mask as index" if is_masked else "a number for indexed places")
            if not all(isinstance(x, CudaTensor) for x in indices):
                self.wait("an index on the host")
            tensors = [args[0], *values]
        elif name in WAITING:
            self.wait(name.strip("_"))
        written = [x for x, spec in zip(args, func._schema.arguments, strict=False) if spec.is_write]
        for x in tensors:
            if not isinstance(x, CudaTensor) and (x.dim() > 0 or any(x is y for y in written)):
                both = "Expected all tensors to be on the same device, but found at least two devices"
                raise RuntimeError(f"{both}, cuda:0 and cpu: {name}")

    def execute(self, func, args, kwargs, tensors: list[torch.Tensor]):
        """Run an operation with `tensors`, or record it in the graph."""
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [HOLE if isinstance(x, torch.Tensor) else x for x in leaves]

        def call(tensors):
            rest = iter(tensors)
            args, kwargs = tree_unflatten((next(rest) if x is HOLE else x for x in leaves), spec)
            return func(*args, **kwargs)

        hosts = [get_host(x) for x in tensors]
        is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)
        is_recorded = self.graph is not None and not is_view
        if is_recorded:  # run on copies of the memory, for the shapes of the results
            hosts = copy.deepcopy(hosts)
        results = call(hosts)
        known = {id(host): x for host, x in zip(hosts, tensors, strict=True)}
        new = {id(x): x for x in tree_leaves(results) if isinstance(x, torch.Tensor) and id(x) not in known}
        if is_recorded:
            made = [new.get(id(x)) for x in tree_leaves(results)]
            self.graph.add(None if "empty" in func.name() else call, tensors, made)
        known |= {key: CudaTensor(x) for key, x in new.items()}
        return tree_map_only(torch.Tensor, lambda x: known[id(x)], results)


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


def make_and_send(make):
    """torch.tensor or torch.as_tensor, in two steps, as they look for a real GPU themselves."""

    def make_here(*args, device=None, **kwargs):
        if device is None and torch.get_default_device().type == "cuda":  # as in `with torch.device("cuda"):`
            device = CUDA
        with torch.device("cpu"):
            made = make(*args, **kwargs)
        return made if device is None else made.detach().to(device).requires_grad_(made.requires_grad)

    return make_here


def group_tensors(*args):
    """How torch groups tensors for its fused operations; it takes them to be on the CPU."""
    groups = GROUP_TENSORS(*args).items()
    return {(CUDA if isinstance(x[0][0][0], CudaTensor) else cpu, dtype): x for (cpu, dtype), x in groups}


@contextlib.contextmanager
def pretend_cuda():
    """Give torch one CUDA device, a `PretendCuda`, until the end of the context."""
    gpu, autocast = PretendCuda(), torch.autocast
    cuda = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_properties": lambda *_: PROPERTIES,
        "synchronize": lambda *_: gpu.wait("synchronize"),
        "manual_seed_all": lambda _: None,
        "Stream": gpu.make_stream,
        "current_stream": lambda *_: gpu.stream,
        "set_stream": lambda stream: setattr(gpu, "stream", stream),
        "stream": lambda _: contextlib.nullcontext(),
        "CUDAGraph": lambda: Graph(gpu),
        "graph": gpu.capture,
    }
    accelerator = {"current_accelerator": lambda **_: CUDA, "current_stream": lambda *_: gpu.stream}
    in_torch = {
        "tensor": make_and_send(torch.tensor),
        "as_tensor": make_and_send(torch.as_tensor),
        "autocast": lambda kind, *args, **kwargs: autocast("cpu", *args, **kwargs),
    }
    foreach_types = [*_foreach_utils._foreach_supported_types, CudaTensor]
    with (
        mock.patch.multiple(torch.cuda, **cuda),
        mock.patch.multiple(torch, **in_torch),
        mock.patch.multiple(torch.Tensor, to=move, cuda=lambda x: x.to(CUDA)),
        mock.patch.multiple(torch.accelerator, **accelerator),
        mock.patch.object(torch._C, "_group_tensors_by_device_and_dtype", group_tensors),
        mock.patch.object(_foreach_utils, "_foreach_supported_types", foreach_types),
        mock.patch.object(torch.__future__, "_overwrite_module_params_on_conversion", True),
        torch.backends.cudnn.flags(enabled=False),  # a build of torch that has it would look for a driver
        torch.backends.mkldnn.flags(enabled=False),  # its LSTM keeps memory that no replay finds
        gpu,
    ):
        yield gpu
