"""Checkpoints: what is written comes back, few are kept, damaged ones are passed over."""

import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import kvsparse_jax as kvs
from train.step import State
from train.store import Store


def state_of(value: float) -> State:
    trainable = {"policy": {"norm": jnp.full((2, 3), value), "proj": jnp.full((2, 3, 4), -value)}}
    return State(trainable, optax.adamw(1e-3).init(trainable), jnp.int32(value))


def nothing(meta):
    """Accepts every checkpoint."""


@pytest.fixture
def written(tmp_path):
    """Checkpoints 2 and 4."""
    with Store(tmp_path / "c", keep=3) as store:
        for step in (2, 4):
            store.save(step, state_of(step), {"step": step, "loader": {"x": [1, None, 0.1]}})
    return tmp_path / "c"


def newest(directory, check=nothing):
    with Store(directory, keep=3) as store:
        return store.newest(state_of(0), check)


def test_state_comes_back(written):
    saved = newest(written)
    assert saved.step == 4
    assert saved.meta == {"step": 4, "loader": {"x": [1, None, 0.1]}}
    assert jax.tree.structure(saved.state) == jax.tree.structure(state_of(4))
    for found, wanted in zip(jax.tree.leaves(saved.state), jax.tree.leaves(state_of(4)), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


def test_empty_directory_has_none(tmp_path):
    assert newest(tmp_path / "c") is None


def test_only_the_last_are_kept(tmp_path):
    with Store(tmp_path / "c", keep=2) as store:
        for step in range(1, 5):
            store.save(step, state_of(step), {"step": step})
        store.save(4, state_of(9), {"step": 9})  # is there already
        store.wait()
        assert store.steps() == [3, 4]
    assert {p.name for p in (tmp_path / "c").glob("seal-*")} == {"seal-3.json", "seal-4.json"}
    assert newest(tmp_path / "c").meta == {"step": 4}


def test_donated_arrays_may_change_while_it_is_written(tmp_path):
    double = jax.jit(lambda s: jax.tree.map(lambda a: a + a, s), donate_argnums=0)
    state = state_of(1)
    with Store(tmp_path / "c", keep=3) as store:
        for step in (1, 2, 3):
            store.save(step, state, {"step": step})
            state = double(state)
        for step in (1, 2, 3):
            found = store.restore(step, state_of(0))
            np.testing.assert_array_equal(found.trainable["policy"]["norm"], np.full((2, 3), 2.0 ** (step - 1)))


def largest(directory: Path) -> Path:
    return max((p for p in directory.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def flip(directory):
    file = max((directory / "state").rglob("d/*"), key=lambda p: p.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(bytes(content))


DAMAGES = {
    "a bit flipped": flip,
    "cut": lambda d: largest(d / "state").write_bytes(b""),
    "no manifest": lambda d: (d / "state" / "manifest.ocdbt").unlink(),
    "no meta": lambda d: (d / "meta" / "metadata").unlink(),
    "meta cut": lambda d: (d / "meta" / "metadata").write_text('{"step": 4, "loa'),
    "meta empty": lambda d: (d / "meta" / "metadata").write_text("{}"),
}


@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_newest_is_passed_over_with_a_word(written, caplog, damage, sealed):
    if not sealed:
        if damage == "a bit flipped":
            pytest.skip("only the checksums tell")
        (written / "seal-4.json").unlink()
    DAMAGES[damage](written / "4")
    with caplog.at_level(logging.WARNING):
        saved = newest(written)
    assert saved.step == 2
    np.testing.assert_array_equal(saved.state.trainable["policy"]["norm"], np.full((2, 3), 2.0))
    assert any("damaged and passed over" in record.message and "4" in record.message for record in caplog.records)
    assert (written / "damaged-4").is_dir()  # kept for whoever wants to look
    with Store(written, keep=3) as store:
        store.save(4, state_of(5), {"step": 4})
    assert float(newest(written).state.trainable["policy"]["norm"][0, 0]) == 5


def test_half_written_is_passed_over(written):
    """What Orbax leaves when the process dies while it writes."""
    (written / "4").rename(written / "4.orbax-checkpoint-tmp-123")
    assert newest(written).step == 2


def test_all_damaged(written):
    for step in (2, 4):
        DAMAGES["cut"](written / str(step))
    for _ in range(2):  # and stays so: a second try must not find an empty directory and start anew
        with pytest.raises(kvs.InputError, match="none of the 2 checkpoints"):
            newest(written)


def test_check_comes_before_the_arrays(written):
    """A checkpoint of other shapes is refused by its settings, not taken for a damaged one."""

    def refuse(meta):
        raise kvs.InputError("other settings")

    with Store(written, keep=3) as store, pytest.raises(kvs.InputError, match="other settings"):
        store.newest({"another": jnp.zeros(3)}, refuse)
    assert (written / "4").is_dir()


def test_discard_after(written):
    with Store(written, keep=3) as store:
        store.discard_after(2)
        assert store.steps() == [2]
    assert not (written / "seal-4.json").exists()
