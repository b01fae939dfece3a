"""The files of conf/ decide about their keys: types, bounds, and what a key means to the run."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from tests.ranks import ROOT, assert_one_line, run_line
from tests.runs import config_of
from utils.command import help, keys
from utils.command.keys import GROUPS, MAY_CHANGE, SAME_RUN
from utils.errors import ConfigError

slow = pytest.mark.slow


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of conf/ that a test may change."""
    shutil.copytree(keys.CONF, tmp_path / "conf")
    monkeypatch.setattr(keys, "CONF", tmp_path / "conf")
    return tmp_path / "conf"


def add(file: Path, line: str) -> None:
    file.write_text(f"{file.read_text()}{line}\n")


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(*overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("file", "key"),
    [
        ("pretrain", "patience"),
        ("arch/hrm", "patience"),
        ("arch/cnn", "arch.patience"),
        pytest.param("data/puzzles", "patience", marks=slow),
        pytest.param("sync/allreduce", "sync.patience", marks=slow),
        pytest.param("optim/adam_atan2", "optim.patience", marks=slow),
    ],
)
def test_a_new_key_takes_one_line_of_one_file(file: str, key: str, conf: Path) -> None:
    choice = ["arch=cnn"] if file == "arch/cnn" else []
    before = config_of(*choice)
    add(
        conf / f"{file}.yaml",
        "patience: null  # [int | auto, >= 2, <= 9, same run] how long to wait",
    )
    made = config_of(*choice, f"{key}=3.0")
    assert repr(OmegaConf.select(made, key)) == "3", "a whole number"
    assert OmegaConf.select(config_of(*choice, f"{key}=auto"), key) == "auto"
    assert OmegaConf.select(config_of(*choice), key) is None
    assert refused(*choice, f"{key}=x") == f"{key}=x: must be a whole number, auto or null"
    assert refused(*choice, f"{key}=1") == f"{key}=1: must be at least 2"
    assert refused(*choice, f"{key}=10") == f"{key}=10: must be at most 9"
    assert before.run_name == made.run_name, "the same run"
    assert not re.search(r"same run|how long|>= 2", OmegaConf.to_yaml(made)), (
        "what is said of a key is no key"
    )


def test_an_option_builds_on_another(conf: Path) -> None:
    guide = (ROOT / "docs" / "adding-an-objective.md").read_text()
    (focal,) = re.findall(r"```yaml\n(.*?)```", guide, re.DOTALL)
    file = conf / "arch" / "focal.yaml"
    file.write_text(focal.replace("focal.Focal", "causal_lm.CausalLM") + "num_layers: 3\n")
    made = config_of("experiment=lm", "arch=focal", "arch.loss.gamma=2")
    assert (made.arch.loss.gamma, made.arch.loss.chunk_tokens) == (2.0, 4096)
    assert config_of("data=tokens", "arch=focal").arch.num_layers == 3
    assert refused("arch=focal", "arch.loss.gamma=-1") == "arch.loss.gamma=-1.0: must be at least 0"
    assert refused("arch=focal", "arch.num_layers=0") == "arch.num_layers=0: must be at least 1"
    assert refused("arch=focal", "arch.kv_heads=x") == (
        "arch.kv_heads=x: must be a whole number or null"
    )
    assert "arch.loss.gamma=1.0  (arch=focal)" in help.answer(["--help", "arch.loss.gamma"])
    assert "at least 1" in help.answer(["arch=focal", "--help", "arch.num_layers"]).split("\n\n")[0]
    file.write_text(focal.replace("- gpt", "- focal"))
    with pytest.raises(ConfigError, match="builds on itself; remove that from its defaults"):
        keys.read(file, "arch")


def test_what_a_mark_means_to_the_run(conf: Path) -> None:
    def differences(one: DictConfig, other: DictConfig) -> set[str]:
        """The keys by which a run would be refused to go on."""
        sides = [
            keys.run_values(OmegaConf.to_container(side), rules, SAME_RUN, MAY_CHANGE)
            for side in (one, other)
        ]  # type: ignore[arg-type]
        return {key for key in sides[0] if sides[0][key] != sides[1].get(key)}

    add(
        conf / "arch" / "hrm.yaml",
        "free: 1  # [same run]\nlonger: 1  # [may change]\nfixed: 1\nplace: null  # [list of str,"
        " names the project]",
    )
    add(conf / "data" / "puzzles.yaml", "shown:  # [same run]\n  colour: red")
    one, rules = config_of(), keys.all_rules()
    for override, renamed, changed in (
        ("free=2", False, set()),
        ("shown.colour=blue", False, set()),
        ("longer=2", True, set()),
        ("epochs=20000", True, set()),
        ("data_paths=[a]", True, set()),
        ("fixed=2", True, {"fixed"}),
        ("eval_interval=100", True, {"eval_interval"}),
    ):
        other = config_of(override)
        assert (one.run_name != other.run_name) == renamed, override
        assert differences(one, other) == changed, override
    assert (one.project_name, config_of("place=[x/y,z]").project_name) == ("puzzles", "y")
    old = OmegaConf.merge(
        one,
        {
            "sync": {"_target_": "optim.exact.build_reducer", "bucket_mb": 3.0, "gone": 1},
            "fixed": 2,
        },
    )
    assert isinstance(old, DictConfig)
    assert differences(old, one) == {"fixed"}, "how gradients were exchanged does not matter"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("new: 1  # [itn]", "new=1: must be itn"),
        (
            "new: null",
            "new=null: must say what else it may hold; write for example [int] behind it",
        ),
        pytest.param("new: null  # [itn]", "new=null: must say what else it may hold", marks=slow),
        pytest.param(
            "new: null  # any number", "new=null: must say what else it may hold", marks=slow
        ),
        (
            "new: 1  # [same rnu]",
            (
                "new: [same rnu]: neither type, bound nor mark; write for example [int | null, >="
                " 1, may change]"
            ),
        ),
        pytest.param(
            "new: 1  # [int, float]", "new: [float]: neither type, bound nor mark", marks=slow
        ),
        pytest.param("new: 1  # [> one]", "new: [> one]: neither type, bound nor mark", marks=slow),
        pytest.param("new: 1  # []", "new: []: neither type, bound nor mark", marks=slow),
        pytest.param(
            "new: 1  # [int, >= 1 and so on",
            "new: [>= 1 and so on]: neither type, bound nor mark",
            marks=slow,
        ),
        ("new: 1  # [>= 2] two", "new=1: must be at least 2"),
        pytest.param("new: true  # [str]", "new=true: must be a word", marks=slow),
        pytest.param("new: auto  # [true | false]", "new=auto: must be true or false", marks=slow),
        ("new: x  # [>= 1]", "new: bounds are for numbers; write for example [int, >= 1]"),
        pytest.param("new: {a: 1}  # [int]", "new={'a': 1}: must be a whole number", marks=slow),
        (
            "new: ${seed}  # [same run]",
            "new: always has the value of ${seed}; what is said of that key holds for it",
        ),
        (
            "# [int]\nnew: 1",
            "these brackets stand behind no key; put them behind the one that they are about",
        ),
        pytest.param(
            "new:  # [same run]\n  deep:\n    er: 1  # [=1]",
            "new.deep.er: [=1]: neither type, bound nor mark",
            marks=slow,
        ),
    ],
)
def test_a_mistake_in_what_a_file_says_is_named_by_its_line(
    line: str, problem: str, conf: Path
) -> None:
    file = conf / "data" / "puzzles.yaml"
    add(file, line)
    number = 1 + next(
        at
        for at, text in enumerate(file.read_text().split("\n"))
        if text.endswith(("new: null", line.rpartition("\n")[2]))
    )
    number -= line.startswith("# [int]")
    assert refused().startswith(f"{file}, line {number}: {problem}")
    assert config_of("data=digits"), "a file that nobody chooses does no harm"
    for name, text in (("list", "- 1"), ("open", "a: ["), ("text", "a: ${"), ("none", "")):
        (conf / "data" / f"{name}.yaml").write_text(text)
    assert "did you mean lr?" in refused("+lrr=1", "data=digits"), (
        "nor is it read where keys are looked for"
    )
    shutil.copy(file, conf / "optim" / "mine.yaml")
    assert f"{conf}/optim/mine.yaml, line {number}: {problem}" in refused(
        "optim=mine", "data=digits"
    )
    add(conf / "pretrain.yaml", line)
    assert re.match(
        rf"{conf}/pretrain.yaml, line \d+: {re.escape(problem)}", refused("data=digits")
    )


@pytest.mark.parametrize("group", GROUPS)
def test_every_file_of_conf_says_what_can_be_read(group: str) -> None:
    for name in keys.files(group):
        made = config_of(f"{group}={name}")
        text = (keys.CONF / group / f"{name}.yaml").read_text()
        at_root = set(OmegaConf.create(text)) if "@package _global_" in text else set()
        assert at_root <= set(made)
        for key in at_root & set(OmegaConf.load(keys.CONF / "pretrain.yaml")) - {group}:
            assert made[key] == OmegaConf.create(text)[key], "the value of the group's file counts"


def test_generic_code_names_no_key_of_one_task() -> None:
    generic = {*OmegaConf.load(keys.CONF / "pretrain.yaml"), *GROUPS}
    of_one = (
        {key for key in keys.all_rules() if re.fullmatch(r"\w+", key)} - generic - {"experiment"}
    )
    assert of_one > {
        "puzzle_emb_lr",
        "puzzle_emb_weight_decay",
        "data_paths",
        "data_paths_test",
        "evaluators",
    }
    named = re.compile(rf"[.\"']({'|'.join(of_one)})\b(?!\()")  # a method may be called like a key
    history = ROOT / "utils/command/renamed.py"  # which must name what there was
    for path in {ROOT / "pretrain.py", *(ROOT / "utils").rglob("*.py")} - {history}:
        assert not named.findall(path.read_text()), path


def test_nets_without_a_table_have_no_optimizer_of_tables() -> None:
    assert "sparse" not in config_of("arch=cnn", "data=digits").optim
    for optim in keys.files("optim"):
        assert config_of(f"optim={optim}", "puzzle_emb_lr=3e-3").optim.sparse.lr == 3e-3


def test_files_of_ones_own_are_held_to_what_they_say(tmp_path: Path) -> None:
    """With --config-dir: a net with other sizes, and a mistake in it."""
    own = tmp_path / "own"
    (own / "arch").mkdir(parents=True)
    text = (ROOT / "conf" / "arch" / "trm.yaml").read_text()
    net = re.sub("num_heads: 8 .*", "num_heads: 8  # [>= 4]", text)
    (own / "arch" / "mine.yaml").write_text(net)
    choice = ["--config-dir", str(own), "arch=mine"]
    assert_one_line(
        run_line([*choice, "arch.num_heads=2"], tmp_path), "arch.num_heads=2: must be at least 4"
    )
    assert_one_line(
        run_line([*choice, "puzzle_emb_lr=-1"], tmp_path), "puzzle_emb_lr=-1.0: must be at least 0"
    )
    assert_one_line(
        run_line(["--config-dir", str(own), "arch=yours"], tmp_path),
        "arch=yours: unknown; choose one of cnn, components, gpt, hrm, induction, mine, ",
    )
    (own / "arch" / "mine.yaml").write_text(net + "sparkle_rate: 7\n")
    for join in ("", "+"):  # Hydra refuses the first, this repository the second
        assert_one_line(
            run_line([*choice, f"{join}sparkle_rte=2"], tmp_path),
            "sparkle_rte=2: unknown key; did you mean sparkle_rate?",
        )
    (own / "arch" / "mine.yaml").write_text(net.replace("[>= 4]", "[=> 4]"))
    number = 1 + net.splitlines().index("  num_heads: 8  # [>= 4]")
    mistake = (
        f"{own}/arch/mine.yaml, line {number}: arch.num_heads: [=> 4]: neither type, bound nor mark"
    )
    assert_one_line(run_line(choice, tmp_path, 2), mistake)


def test_an_experiment_whose_keys_nobody_reads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("lr: 1e-3\n")
    assert_one_line(
        run_line([f"--config-dir={tmp_path}", "experiment=mine"], tmp_path),
        "experiment.lr=0.001: nothing reads keys below experiment; begin its file with"
        " # @package _global_",
    )
    assert_one_line(run_line(["+experiment.x=1"], tmp_path), "experiment.x=1: nothing reads keys")


@pytest.mark.parametrize(
    ("file", "content", "choice", "problem"),
    [
        (
            "experiment/mine",
            b"# @package _global_\ndefaults:\n  - mine\n",
            "experiment=mine",
            "a file of conf/ or --config-dir builds on itself",
        ),
        ("arch/mine", b"\xff\xfe", "arch=mine", "is no text in UTF-8"),
        ("arch/mine", b"", "arch=mine", "for example _target_: models.language.gpt.GPT"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_line(
    file: str, content: bytes, choice: str, problem: str, tmp_path: Path
) -> None:
    path = (tmp_path / file).with_suffix(".yaml")
    path.parent.mkdir()
    path.write_bytes(content)
    assert_one_line(run_line([f"--config-dir={tmp_path}", choice], tmp_path), problem)
