"""Answers a Sudoku with a trained HRM or TRM, without lockstep: copy this file and change it.

python -m utils.checkpoint export runs/demo/demo weights
python docs/answer_alone.py weights/model.safetensors runs/demo/demo/config.yaml "41.3.5 .23.4. …"
"""

import sys

import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file


def logits_of(weights: str, config: str, tokens: list[int]) -> torch.Tensor:
    """Returns the scores of each token in each cell, after all thinking steps."""
    with open(config) as file:
        arch = yaml.safe_load(file)["arch"]
    dtype, width = getattr(torch, arch["forward_dtype"]), arch["hidden_size"]
    w = {name.removeprefix("model.inner."): value for name, value in load_file(weights).items()}
    w = {name: value.to(dtype) for name, value in w.items() if value.is_floating_point()}

    def norm(x: torch.Tensor) -> torch.Tensor:
        square = x.float().square().mean(-1, keepdim=True)
        return (x.float() * torch.rsqrt(square + 1e-5)).to(dtype)

    def mlp(name: str, x: torch.Tensor) -> torch.Tensor:
        gate, up = F.linear(x, w[f"{name}.gate_up_proj.weight"]).chunk(2, -1)
        both = torch.sigmoid(gate) * norm(gate * up) if arch["mlp_norm"] else F.silu(gate) * up
        return F.linear(both, w[f"{name}.down_proj.weight"])

    def rotate(x: torch.Tensor) -> torch.Tensor:
        first, second = x.float().chunk(2, -1)
        turned = x.float() * angles.cos() + torch.cat((-second, first), -1) * angles.sin()
        return turned.to(dtype) if arch["pos_encodings"] == "rope" else x

    def attention(name: str, x: torch.Tensor) -> torch.Tensor:
        heads = F.linear(x, w[f"{name}.qkv_proj.weight"]).unflatten(-1, (-1, head)).transpose(1, 2)
        query, key, value = heads.chunk(3, 1)
        mixed = F.scaled_dot_product_attention(rotate(query), rotate(key), value)
        return F.linear(mixed.transpose(1, 2).flatten(2), w[f"{name}.o_proj.weight"])

    def level(name: str, x: torch.Tensor) -> torch.Tensor:
        for block in range(len({key.split(".")[2] for key in w if key.startswith(name)})):
            place = f"{name}.layers.{block}"
            if arch["mlp_t"]:  # mixes cells
                x = x.transpose(1, 2)
                x = norm(x + mlp(f"{place}.mlp_t", x)).transpose(1, 2)
            else:
                x = norm(x + attention(f"{place}.self_attn", x))
            x = norm(x + mlp(f"{place}.mlp", x))
        return x

    row = w["puzzle_emb.weights"][0] if "puzzle_emb.weights" in w else torch.zeros(0, dtype=dtype)
    prefix, head = arch["puzzle_emb_len"] or -(-len(row) // width), width // arch["num_heads"]
    rates = 1 / arch["rope_theta"] ** (torch.arange(0, head, 2, dtype=torch.float32) / head)
    places = torch.arange(prefix + len(tokens), dtype=torch.float32)
    angles = torch.outer(places, rates).repeat(1, 2)
    before = F.pad(row, (0, prefix * width - len(row))).view(prefix, width)
    question = torch.cat((before, w["embed_tokens.embedding_weight"][tokens]))[None] * width**0.5
    z_H, z_L = (w[f"{name}_init"].expand_as(question) for name in "HL")
    high = "H_level" if any(key.startswith("H_level") for key in w) else "L_level"
    for _ in range(arch["halt_max_steps"] * arch["H_cycles"]):
        injected = z_H + question
        for _ in range(arch["L_cycles"]):
            z_L = level("L_level", z_L + injected)
        z_H = level(high, z_H + z_L)
    return F.linear(z_H, w["lm_head.weight"])[0, prefix:]


if __name__ == "__main__":
    signs = "?.123456789"  # of tokens; no cell of a board is padding
    board = "".join("".join(sys.argv[3:]).split()).translate(str.maketrans("0_", ".."))
    answer = logits_of(sys.argv[1], sys.argv[2], [signs.index(cell) for cell in board]).argmax(-1)
    print("".join(signs[token] for token in answer))
