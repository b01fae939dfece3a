"""Training steps of the published trainer (github.com/goodfire-ai/spd at 3f0bb61) on a CPU in
float32, for bench_components.

Runs by a Python that has what the checkout imports, with the checkout on PYTHONPATH: `python
spd_step.py RECIPE BATCH`. Nets, data, masks, gates and losses are theirs, by their own
configuration of the experiment; weights of targets are random.
"""

import logging
import sys
from pathlib import Path

import torch
import yaml
from spd import run_spd
from spd.configs import Config
from spd.experiments.resid_mlp.configs import ResidMLPModelConfig
from spd.experiments.resid_mlp.models import ResidMLP
from spd.experiments.resid_mlp.resid_mlp_dataset import ResidMLPDataset
from spd.experiments.tms.configs import TMSModelConfig
from spd.experiments.tms.models import TMSModel
from spd.losses import compute_total_loss
from spd.models.component_model import ComponentModel
from spd.utils.data_utils import SparseFeatureDataset
from spd.utils.module_utils import expand_module_patterns
from turns import serve  # this script runs by its path, with the checkout before ours

FILES = {
    "tms_5_2": "tms/tms_5-2",
    "tms_40_10": "tms/tms_40-10",
    "resid_mlp_1": "resid_mlp/resid_mlp1",
}


def problem(recipe, task):
    """The net to decompose, its data, and its tied layers."""
    known = {
        "device": "cpu",
        "feature_probability": task.feature_probability,
        "data_generation_type": task.data_generation_type,
    }
    if recipe == "resid_mlp_1":
        shape = ResidMLPModelConfig(
            n_features=100,
            d_embed=1000,
            d_mlp=50,
            n_layers=1,
            act_fn_name="relu",
            in_bias=False,
            out_bias=False,
        )
        net = ResidMLP(shape)
        net.W_E.data = torch.nn.functional.normalize(torch.randn(100, 1000), dim=1)
        net.W_U.data = net.W_E.data.T
        return net, ResidMLPDataset(n_features=100, calc_labels=False, **known), []
    features, hidden = (5, 2) if recipe == "tms_5_2" else (40, 10)
    shape = TMSModelConfig(
        n_features=features,
        n_hidden=hidden,
        n_hidden_layers=0,
        tied_weights=True,
        init_bias_to_zero=True,
        device="cpu",
    )
    return (
        TMSModel(shape),
        SparseFeatureDataset(n_features=features, value_range=(0.0, 1.0), **known),
        [("linear1", "linear2")],
    )


def stepper(recipe, batch):
    """One training step as their loop takes it, without evaluation and files."""
    folder = Path(run_spd.__file__).parent / "experiments"
    written = yaml.safe_load((folder / f"{FILES[recipe]}_config.yaml").read_text())
    config = Config(
        **{**written, "batch_size": batch, "wandb_project": None, "autocast_bf16": False}
    )
    target, data, tied = problem(recipe, config.task_config)
    target.eval().requires_grad_(False)
    model = ComponentModel(
        target_model=target,
        module_path_info=expand_module_patterns(target, config.all_module_info),
        ci_fn_type=config.ci_fn_type,
        ci_fn_hidden_dims=config.ci_fn_hidden_dims,
        pretrained_model_output_attr=config.pretrained_model_output_attr,
        sigmoid_type=config.sigmoid_type,
    )
    for source, other in tied:
        model.components[other].U.data = model.components[source].V.data.T
        model.components[other].V.data = model.components[source].U.data.T
    parts = [model.components[name] for name in model.target_module_paths] + [
        model.ci_fns[name] for name in model.target_module_paths
    ]
    optimizer = torch.optim.AdamW(
        [p for part in parts for p in part.parameters()], lr=1e-3, weight_decay=0
    )

    def step():
        optimizer.zero_grad()
        deltas = model.calc_weight_deltas()
        inputs = data.generate_batch(batch)[0]
        out = model(inputs, cache_type="input")
        gates = model.calc_causal_importances(
            pre_weight_acts=out.cache, detach_inputs=False, sampling=config.sampling
        )
        loss, _ = compute_total_loss(
            loss_metric_configs=config.loss_metric_configs,
            model=model,
            batch=inputs,
            ci=gates,
            target_out=out.output,
            weight_deltas=deltas,
            pre_weight_acts=out.cache,
            current_frac_of_training=0.5,
            sampling=config.sampling,
            n_mask_samples=config.n_mask_samples,
            use_delta_component=config.use_delta_component,
            output_loss_type=config.output_loss_type,
        )
        loss.backward()
        optimizer.step()

    return step


def main():
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    step = stepper(sys.argv[1], int(sys.argv[2]))
    for _ in range(5):
        step()
    serve(step)


if __name__ == "__main__":
    main()
