"""A small Llama of TorchTitan with dynamic masks gives the same results on pieces as on whole sequences, and a
load balancer raises."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from processes import run_in_processes

pytest.importorskip("torchtitan", reason="torchtitan is not installed")

N, BATCH, VOCABULARY = 96, 2, 2048


def make_llama(config=None):
    from torchtitan.models.llama3 import model_registry

    from flash_dmattn.integrations.torchtitan import with_dynamic_masks

    spec = with_dynamic_masks(
        model_registry("debugmodel"), keep_window_size=17, recent_window=4, sink_tokens=2
    )  # fmt: skip
    spec.model.layers = spec.model.layers[:2]
    if config is not None:
        spec.model.update_from_config(config=config)
    torch.manual_seed(0)
    model = spec.model.build()
    model.init_states(buffer_device=torch.device("cpu"))
    return spec, model


def loss_and_gradients(model, tokens, labels, positions):
    logits = model(tokens, positions=positions)
    if hasattr(logits, "full_tensor"):
        logits = logits.full_tensor()
    losses = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), labels.flatten(), reduction="sum"
    )
    losses.backward()
    results = [losses.detach()]
    for parameter in model.parameters():
        gradient = parameter.grad
        results.append(gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient)
    return results


def batch():
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCABULARY, (BATCH, N + 1), generator=generator)
    positions = torch.arange(N).expand(BATCH, -1)
    return tokens[:, :-1], tokens[:, 1:], positions


def pieces_equal_the_whole(rank, count):
    from torch.distributed.device_mesh import init_device_mesh
    from torchtitan.distributed.context_parallel import (
        apply_cp_to_forward,
        prepare_context_parallel_input,
    )

    mesh = init_device_mesh("cpu", (count,), mesh_dim_names=("cp",))
    inputs, labels, positions = batch()
    _, whole = make_llama()
    expected = loss_and_gradients(whole, inputs, labels, positions)
    _, model = make_llama()
    apply_cp_to_forward([layer.attention.inner_attention for layer in model.layers.values()], mesh)
    inputs, labels, extra = prepare_context_parallel_input(
        inputs, labels, {"positions": positions}, mesh, torch.device("cpu"), None
    )
    results = loss_and_gradients(model, inputs, labels, extra["positions"])
    for part in results:
        dist.all_reduce(part)
    for actual, wanted in zip(results, expected, strict=True):
        assert (actual - wanted).norm() <= 1e-4 * wanted.norm()
    scores = [p for name, p in model.named_parameters() if "inner_attention" in name]
    assert len(scores) == 4 and all(p.grad.any() for p in scores)


@pytest.mark.parametrize("count", [2, 3])
def test_pieces_equal_the_whole(count):
    run_in_processes(count, pieces_equal_the_whole, count)


def parallelized_equals_the_whole(rank, degrees):
    """Calls TorchTitan's own function, as its Trainer does."""
    from torch.distributed.fsdp import FSDPModule
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.distributed.context_parallel import prepare_context_parallel_input

    parallel_dims.device_type = "cpu"  # in this process: it takes CUDA where there is no GPU
    shard, cp, tp = degrees
    parallelism = ParallelismConfig(
        data_parallel_shard_degree=shard, context_parallel_degree=cp, tensor_parallel_degree=tp,
        context_parallel_load_balancer=None, spmd_backend="partial_dtensor",
    )  # fmt: skip
    training = TrainingConfig(
        mixed_precision_param="float32", mixed_precision_reduce="float32", seq_len=N
    )
    dims = ParallelDims.from_config(parallelism, dist.get_world_size())
    dims.build_mesh()
    inputs, labels, positions = batch()
    expected = loss_and_gradients(make_llama()[1], inputs, labels, positions)
    spec, model = make_llama(SimpleNamespace(parallelism=parallelism, training=training))
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=training, parallelism=parallelism, compile_config=CompileConfig(enable=False),
        ac_config=None, dump_folder="",
    )  # fmt: skip
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other
    mine = slice(None)
    if shard > 1:
        dp = rank // (cp * tp)
        mine = slice(dp, dp + 1)  # a sequence of the batch
    inputs, labels, extra = prepare_context_parallel_input(
        inputs[mine], labels[mine], {"positions": positions[mine]}, dims.get_mesh("cp"), torch.device("cpu"), None
    )  # fmt: skip
    results = loss_and_gradients(model, inputs, labels, extra["positions"])
    dist.all_reduce(results[0])
    results[0] /= tp
    for actual, wanted in zip(results, expected, strict=True):
        assert (actual - wanted).norm() <= 1e-4 * wanted.norm()


@pytest.mark.parametrize("degrees", [(2, 2, 1), (1, 2, 2)], ids=["fsdp x cp", "cp x tp"])
def test_parallelized_model_equals_the_whole(degrees):
    run_in_processes(4, parallelized_equals_the_whole, degrees)


@pytest.mark.parametrize(
    ("balancer", "backend", "words"),
    [
        ("headtail", "partial_dtensor", "permutation: got 'headtail', expected None"),
        (None, "spmd_types", "spmd_backend: got 'spmd_types'"),
    ],
)
def test_order_or_gathering_of_keys_raises(balancer, backend, words):
    spec, model = make_llama()
    parallelism = SimpleNamespace(context_parallel_load_balancer=balancer, spmd_backend=backend)
    with pytest.raises(ValueError, match=words):
        spec.parallelize_fn(
            model, parallel_dims=SimpleNamespace(cp_enabled=True), parallelism=parallelism
        )


@pytest.mark.parametrize("name", ["llama3_debugmodel_dynamic_masks", "llama3_8b_dynamic_masks"])
def test_example_is_a_config_whose_attention_chooses_keys(name):
    from torchtitan.config import ConfigManager

    from flash_dmattn.integrations.torchtitan import DynamicMaskInnerAttention

    config = ConfigManager().parse_args(
        ["--module", "torchtitan_llama", "--config", name, "--training.seq_len", "4096"]
    )
    config.model_spec.model.update_from_config(config=config)
    attention_configs = list(config.model_spec.traverse(DynamicMaskInnerAttention.Config))
    assert config.training.seq_len == 4096
    assert len(attention_configs) == len(config.model_spec.model.layers)
    assert config.parallelism.context_parallel_load_balancer is None


def test_attention_masks_of_torchtitan_raise():
    _, model = make_llama()
    inputs, _, positions = batch()
    with pytest.raises(ValueError, match="attention_masks: got str, expected None"):
        model(inputs, positions=positions, attention_masks="causal")
