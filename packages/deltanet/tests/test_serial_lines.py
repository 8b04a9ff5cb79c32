"""Which line of its table a serial kernel takes, on cards that are not there."""

import pytest
import torch
from fusewright.deltanet import _problem
from fusewright.deltanet._backends import Card
from fusewright.deltanet._configs import STATE_GRADIENTS, STATES
from fusewright_testkit.compiled import SHARED_KIB

# Of each table: rows of keys and of values that a chunk loads.
TABLES = {"states": (STATES, 2, 1), "state_gradients": (STATE_GRADIENTS, 3, 2)}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def card(monkeypatch):
    """Puts a card of this capability in the place of the machine's own."""

    def put(capability):
        found = Card(132, SHARED_KIB[capability] << 10, capability)
        monkeypatch.setattr(_problem, "card_of", lambda device: found)
        # As without the interpreter.
        monkeypatch.setattr(_problem, "FEWEST_ROWS", 64)
        return found

    return put


def problem(keys, heads, dtype):
    return _problem.Problem(
        *(1, 256, heads, heads, keys, keys),
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
def test_bf16_heads_are_cut_as_finely_as_the_card_has_multiprocessors(
    card, keys, heads, states, gradients
):
    card(90)
    for name, wanted in (("states", states), ("state_gradients", gradients)):
        line = problem(keys, heads, torch.bfloat16).serial(*TABLES[name])
        assert (line.block_v, line.num_stages) == wanted, name


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_no_16_bit_launch_on_hopper_is_without_loads_ahead(card, table, dtype):
    """There ptxas reads registers that nothing has written."""
    card(90)
    for keys in range(1, _problem.WIDEST + 1):
        for heads in (1, 8, 40, 200):
            assert problem(keys, heads, dtype).serial(*TABLES[table]).num_stages > 1


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("capability", SHARED_KIB)
def test_loads_of_a_line_fit_beside_its_state(card, table, capability):
    shared = card(capability).shared_bytes
    configs, key_rows, value_rows = TABLES[table]
    for dtype in DTYPES:
        for keys in (16, 64, 96, 128, 200, 256):
            for heads in (1, 40, 200):
                case = problem(keys, heads, dtype)
                line = case.serial(configs, key_rows, value_rows)
                wide, narrow = case.block_k(line), case.block_v(line)
                buffers = line.num_stages - (0 if capability == 90 and dtype.itemsize == 2 else 1)
                rows = 64 * (key_rows * wide + value_rows * narrow)
                assert dtype.itemsize * (buffers * rows + wide * narrow) <= shared
