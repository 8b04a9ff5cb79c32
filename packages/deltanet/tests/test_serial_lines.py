"""Which line of its table a serial kernel takes, on GPUs that are not there."""

import itertools

import pytest
import torch
from fusewright.deltanet._core.backends import DeviceProperties
from fusewright.deltanet.rule import launch
from fusewright.deltanet.rule.launch import STATES
from fusewright.deltanet.rule.launch_backward import STATE_GRADIENTS
from fusewright_testkit.compiled import SHARED_KIB

# Each table, and rows of keys and of values that a chunk loads.
TABLES = {
    "states": (STATES, dict(key_rows=2, value_rows=1)),
    "state_gradients": (STATE_GRADIENTS, dict(key_rows=3, value_rows=2)),
}


def serial(table, case):
    configs, rows = TABLES[table]
    return case.serial(configs, **rows)


@pytest.fixture
def gpu(monkeypatch):
    """Puts a GPU of this capability in the place of the machine's own."""

    def put(capability):
        properties = DeviceProperties(132, SHARED_KIB[capability] << 10, capability)
        monkeypatch.setattr(launch, "device_properties", lambda device: properties)
        # As without the interpreter.
        monkeypatch.setattr(launch, "FEWEST_ROWS", 64)
        return properties

    return put


def problem(keys, width, heads, dtype):
    return launch.Problem(
        *(1, 256, heads, heads, keys, width),
        sequences=1,
        chunks=4,
        varlen=False,
        has_state=False,
        dtype=dtype,
        precision="tf32x3",
        device=torch.device("cpu"),
    )


@pytest.mark.parametrize(
    ("keys", "heads", "states", "gradients"),
    [(128, 16, (16, 4), (16, 3)), (128, 32, (32, 4), (32, 3)), (128, 64, (64, 4), (64, 3)),
     (64, 128, (64, 4), (64, 3)), (256, 16, (32, 3), (32, 2)), (256, 4, (16, 3), (16, 2))],
)  # fmt: skip
def test_bf16_heads_are_cut_as_finely_as_the_gpu_has_multiprocessors(
    gpu, keys, heads, states, gradients
):
    gpu(90)
    for table, wanted in (("states", states), ("state_gradients", gradients)):
        line = serial(table, problem(keys, keys, heads, torch.bfloat16))
        assert (line.block_v, line.num_stages) == wanted, table


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_16_bit_launch_on_hopper_is_without_loads_ahead(gpu, table, dtype):
    """There ptxas reads registers that nothing has written."""
    gpu(90)
    for keys, width in itertools.product(range(16, 257, 16), repeat=2):
        for heads in (1, 8, 40, 200):
            assert serial(table, problem(keys, width, heads, dtype)).num_stages > 1


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_other_launch_has_more_than_two_stages(gpu, table, dtype):
    gpu(90 if dtype == torch.float32 else 80)
    for keys, width in itertools.product((16, 64, 96, 128, 208, 256), repeat=2):
        line = serial(table, problem(keys, width, 200, dtype))
        assert line.num_stages <= 2
        assert keys < 256 or line.block_v == 16
