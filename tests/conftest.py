"""Settings that every test runs under, and where the golden data is.

Everything here that is an environment variable also reaches the commands that tests start as subprocesses.
"""

import fnmatch
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


# All of this has to be in place before jax is imported.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4".strip()
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    # Nearly all time goes into compiling programs for tiny models: LLVM's optimisations are half of it.
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
# Many tests, and the commands that they start, compile the same programs. A second run takes a quarter of the time.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".pytest_cache" / "programs"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", str(ROOT / ".pytest_cache" / "hypothesis"))
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may depend on a hub
os.environ.setdefault("MPLBACKEND", "agg")

import hypothesis  # noqa: E402
import jax  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "highest")

# Tracing makes many objects that live on; looking at all of them every few hundred costs a tenth of the time.
gc.set_threshold(200_000, 50, 100)

# A first example compiles, so no deadline; the same examples every time, so that a failure belongs to the change.
hypothesis.settings.register_profile("project", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("project")


# What others of its kind show, too, at length: `make test` runs it, CI does not.
AGAIN = (
    "test_answers.py::test_answers_are_those*",
    "test_cache.py::test_any_chunking_equals_the_rule[[]0-1-*",
    "test_cache.py::test_any_chunking_equals_the_rule[[]1-*",
    "test_cache.py::test_any_chunking_equals_the_rule[[]5-0-*",
    "test_cache.py::test_any_chunking_equals_the_rule[[]100-1-*",
    "test_cache.py::test_layout_of_tpus[[][68]*",
    "test_cache.py::test_no_step_copies_the_pool*float8_e4m3*",
    "test_delayed_attention.py::test_blockwise_equals_dense[[]False-True]",
    "test_delayed_attention.py::test_blockwise_equals_dense[[]True-False]",
    "test_distributed.py::test_tokens_do_not_depend_on_the_devices[[]4-more[12]]",
    "test_distributed.py::test_two_processes_train_as_one_does[[]mesh1]",
    "test_engine.py::*deepseek_v2*",
    "test_engine.py::test_families[[]gemma3_text*",
    "test_engine.py::test_families[[]mistral_sliding*",
    "test_engine.py::test_families[[]qwen3_moe*",
    "test_evaluate.py::test_policies_are_compared_on_what_follows*",
    "test_families.py::*deepseek_v2*",
    "test_families.py::test_eight_bits[[]gemma3_text]",
    "test_families.py::test_experts_on_a_mesh[[]qwen3_moe]",
    "test_families.py::test_kvzap_and_its_oracle[[]deepseek_v3]",
    "test_families.py::test_kvzap_and_its_oracle[[]phi3_partial]",
    "test_families.py::test_kvzap_and_its_oracle[[]qwen3_moe]",
    "test_families.py::test_lora*[[][!g]*",
    "test_families.py::test_retrofit_evaluate_and_load_again[[]gemma3_text]",
    "test_families.py::test_retrofit_evaluate_and_load_again[[]mistral_sliding]",
    "test_families.py::test_retrofit_evaluate_and_load_again[[]phi3_partial]",
    "test_families.py::test_retrofit_evaluate_and_load_again[[]qwen3_moe]",
    "test_families.py::test_three_turns_equal_the_masked_reference[[]gemma3_text]",
    "test_families.py::test_three_turns_equal_the_masked_reference[[]mistral_sliding]",
    "test_families.py::test_three_turns_equal_the_masked_reference[[]phi3_partial]",
    "test_families.py::test_three_turns_equal_the_masked_reference[[]qwen3_moe]",
    "test_generation.py::test_hugging_face_greedy[[]llama_tied]",
    "test_generation.py::test_hugging_face_greedy[[]mistral_sliding]",
    "test_generation.py::test_hugging_face_greedy[[]phi3_*",
    "test_generation.py::test_hugging_face_greedy[[]qwen3_moe]",
    "test_generation.py::test_streaming_llm_and_the_pool*",
    "test_generation.py::test_the_pool_is_not_copied*-4]",
    "test_generation.py::test_the_pool_is_not_copied[[][DH][M2]*-None]",
    "test_kvzap_training.py::test_continuations_compare_on_what_follows*",
    "test_mosaic_attention.py::test_forward_equals_reference[[]96-*",
    "test_mosaic_attention.py::test_forward_equals_reference[[]192-*",
    "test_mosaic_backward.py::test_gradients_equal_reference[[]64-256-1-soft-*",
    "test_mosaic_backward.py::test_gradients_equal_reference[[]96-*",
    "test_mosaic_backward.py::test_gradients_equal_reference[[]128-256-*",
    "test_mosaic_backward.py::test_gradients_equal_reference[[]192-256-*",
    "test_mosaic_backward.py::test_gradients_equal_reference[[]256-256-*",
    "test_mosaic_decode.py::test_groups[[][58]]",
    "test_mosaic_decode.py::test_head_dimensions_and_types[[]96-*",
    "test_mosaic_decode.py::test_head_dimensions_and_types[[]192-bfloat16]",
    "test_plan.py::test_every_family_holds*[[]deepseek_v3]",
    "test_plan.py::test_every_family_holds*[[]mistral_sliding]",
    "test_plan.py::test_every_family_holds*[[]phi3_fused]",
    "test_plan.py::test_every_family_holds*[[]qwen3_moe]",
    "test_policies.py::test_budgets_equal_a_dense_model_that_forgets[[]gemma3_text-*",
    "test_policies.py::test_budgets_equal_a_dense_model_that_forgets[[]qwen3-H2O-{'budget': 10}]",
    "test_policies.py::test_budgets_equal_a_dense_model_that_forgets[[]qwen3-H2O-*layer*",
    "test_policies.py::test_budgets_equal_a_dense_model_that_forgets[[]qwen3-Knorm-*sinks*",
    "test_policies.py::test_budgets_equal_a_dense_model_that_forgets[[]qwen3-TOVA-{'budget': 9}]",
    "test_policies.py::test_dense_prefill_equals_the_reference[[]dense-5-*",
    "test_policies.py::test_dense_prefill_equals_the_reference[[]dense-None-[dq]*",
    "test_policies.py::test_dense_prefill_equals_the_reference[[]paged-None-*",
    "test_policies.py::test_dense_prefill_equals_the_reference[[]paged-5-[eqs]*",
    "test_policies.py::test_rows_with_a_budget_are_independent[[]SnapKV]",
    "test_policies.py::test_rule_holds_everywhere[[]0-4]",
    "test_policies.py::test_rule_holds_everywhere[[]3-0]",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks what AGAIN names."""
    for item in items:
        if any(fnmatch.fnmatchcase(item.nodeid.removeprefix("tests/"), pattern) for pattern in AGAIN):
            item.add_marker("again")


@pytest.fixture(scope="session")
def golden_models() -> Path:
    """The tiny Hugging Face checkpoints with their logits (tests/data/README.md)."""
    return ROOT / "tests" / "data" / "models"


@pytest.fixture(scope="session")
def golden_methods() -> Path:
    """The numbers of the original DMS code (tests/data/README.md)."""
    return ROOT / "tests" / "data" / "methods"


@pytest.fixture(scope="session")
def shared_golden() -> Path:
    """The full golden set, which lies beside a developer's checkout and is not part of the repository."""
    path = ROOT.parent / "shared" / "golden"
    if not path.is_dir():
        pytest.skip("needs the full golden set in ../shared/golden, which is not part of the repository")
    return path


def _mapped() -> int:
    """Memory regions of this process."""
    maps = Path("/proc/self/maps")
    return maps.read_text().count("\n") if maps.exists() else 0


@pytest.fixture(autouse=True)
def _few_programs() -> Iterator[None]:
    """Forgets the compiled programs of each test file at its end, and whenever there are many.

    XLA:CPU maps several memory regions per program, a process may have 65,530 of them (Linux' vm.max_map_count), and
    the compiler crashes when they run out.
    """
    yield
    if _mapped() > 25_000:
        _forget()


@pytest.fixture(scope="module", autouse=True)
def _no_programs_of_other_files() -> Iterator[None]:
    yield
    _forget()


def _forget() -> None:
    jax.clear_caches()
    gc.collect()
