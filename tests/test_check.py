"""check_params: its verdicts on norms, their messages, and the printed table."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxnorm
from jaxnorm.models import conversion

pytestmark = pytest.mark.usefixtures("quick_to_compile")


def params():
    return {
        "block": {
            "norm1": {"scale": jnp.ones(8), "bias": jnp.zeros(8)},
            "norm2": {"scale": jnp.ones(8).at[3].set(0), "bias": jnp.zeros(8)},
            "dense": {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)},
        },
        "final": {"scale": jnp.full(8, 1e-3), "bias": jnp.ones(8)},
    }


def test_finds_norms_only_and_judges_each():
    report = jaxnorm.check_params(params(), jnp.bfloat16)
    assert [n.path for n in report] == ["block/norm1", "block/norm2", "final"]
    norm1, norm2, final = report
    assert (norm1.columns, norm1.under_floor, norm1.max_bias_ratio) == (8, 0, 0.0)
    assert norm1.dscale_error == pytest.approx(0.83 * 2**-9)
    assert (norm2.under_floor, norm2.verdict) == (1, "safe")
    assert final.max_bias_ratio == pytest.approx(1 / np.float32(1e-3))
    assert final.verdict == 'save="input" advised'
    assert not report.safe
    assert jaxnorm.check_params(params(), jnp.float32).safe
    lines = str(report).splitlines()
    assert lines[0].split("  ")[0] == "norm"
    assert [line.split()[0] for line in lines[1:]] == ["block/norm1", "block/norm2", "final"]
    assert lines[3].endswith('save="input" advised')
    for stored in ({}, {"kernel": jnp.ones((3, 3))}, {"head": {"weight": jnp.ones((3, 4))}}):
        nothing = jaxnorm.check_params(stored, jnp.bfloat16)
        assert (len(nothing), nothing.safe) == (0, False)
        assert str(nothing).startswith("no norm found")


def test_float16_degrades_below_its_normal_numbers():
    """In float16, the predicted error of dscale is 2 % at a scale of 2^-20, and 30 % at 2^-24.

    At a scale of 0, it is 100 %.
    """
    for scale, low, high in [(2**-20, 0.01, 0.03), (2**-24, 0.2, 0.4), (0.0, 1.0, 1.0)]:
        (norm,) = jaxnorm.check_params({"scale": jnp.full(4, scale)}, jnp.float16)
        assert norm.under_floor == 4
        assert low <= norm.dscale_error <= high


def test_models_of_flax():
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(6, rngs=rngs)
            self.dense = nnx.Linear(6, 6, rngs=rngs)

    variables = nn.Sequential([nn.Dense(4), nn.LayerNorm(), nn.RMSNorm()]).init(
        jax.random.key(0), jnp.ones((2, 3))
    )
    assert len(jaxnorm.check_params(variables["params"], jnp.bfloat16)) == 2
    block = Block(nnx.Rngs(0))
    block.norm.bias[...] = jnp.full(6, 3.0)
    for tree in (nnx.state(block), nnx.state(block, nnx.Param), nnx.to_pure_dict(nnx.state(block))):
        (norm,) = jaxnorm.check_params(tree, jnp.bfloat16)
        assert (norm.path, norm.max_bias_ratio) == ("norm", 3.0)


def names(stored):
    return [norm.path for norm in jaxnorm.check_params(stored, jnp.bfloat16)]


LLAMA = {
    "model.embed_tokens": {"weight": (64, 8)},
    "model.layers.0.input_layernorm": {"weight": (8,)},
    "model.layers.0.self_attn.q_proj": {"weight": (8, 8)},
    "model.layers.0.self_attn.q_norm": {"weight": (4,)},
    "model.layers.0.mlp.up_proj": {"weight": (16, 8), "bias": (16,)},
    "model.layers.0.post_attention_layernorm": {"weight": (8,), "bias": (8,)},
    "model.norm": {"weight": (8,)},
    "lm_head": {"weight": (64, 8)},
}
LLAMA_S_NORMS = [
    "model/layers/0/input_layernorm",
    "model/layers/0/post_attention_layernorm",
    "model/layers/0/self_attn/q_norm",
    "model/norm",
]


def nested(batch=()):
    tree = {}
    for module, parameters in LLAMA.items():
        node = tree
        for part in module.split("."):
            node = node.setdefault(part, {})
        node |= {name: jnp.ones((*batch, *shape)) for name, shape in parameters.items()}
    return tree


def joined(separator):
    """Return a flat dict from joined names to arrays, as in a PyTorch state dictionary."""
    return {
        f"{module}.{name}".replace(".", separator): jnp.ones(shape)
        for module, parameters in LLAMA.items()
        for name, shape in parameters.items()
    }


@pytest.mark.parametrize("tree", [*map(nested, [(), (3,), (2, 3)]), joined("."), joined("/")])
def test_weights_of_norms_and_of_others(tree):
    """Norms are recognised in a tree that also has other layers, whether layers are stacked or not.

    In a single layer, a weight that is a vector belongs to a norm. In stacked layers, the shape of
    the bias or the module's name decides.
    """
    assert sorted(names(tree)) == LLAMA_S_NORMS


@pytest.mark.parametrize(
    ("name", "is_a_norm_s"),
    [
        *dict.fromkeys(["norm", "k_norm", "input_layernorm", "LayerNorm_0", "norm2"], True).items(),
        *dict.fromkeys(["ln_1", "ln2", "ln_f", "norm_f", "attn_ln", "RMSNorm_12"], True).items(),
        *dict.fromkeys(["norm_proj", "linear", "0", "normalised", "kiln", "wte"], False).items(),
    ],
)
def test_the_name_decides_on_a_stacked_weight_without_a_bias(name, is_a_norm_s):
    assert (
        names({"layers": {name: {"weight": jnp.ones((2, 8))}}}) == [f"layers/{name}"] * is_a_norm_s
    )
    assert names({name: {"weight": jnp.ones(())}}) == []


def test_norm_classes_of_models_own():
    """Parameters named ``w``, as in Tunix, are recognised; other names can be passed."""
    w, matrix = np.ones((2, 4)), np.ones((4, 4))
    tree = {
        "q_norm": {"w": w, "b": np.full((2, 4), 1e3)},
        "input_layernorm": {"w": w[0]},
        "q_proj": {"w": matrix},
        "mlp": {"g": w[0]},
        "norm": {"g": w},
    }
    report = jaxnorm.check_params(tree, "bfloat16")
    assert {norm.path: norm.verdict for norm in report} == {
        "q_norm": 'save="input" advised',
        "input_layernorm": "safe",
    }
    offset = {"norm": {"weight": np.zeros(8)}}
    assert not jaxnorm.check_params(offset, "float16").safe
    assert jaxnorm.check_params(offset, "float16", scale_offset=1.0).safe
    for names in ("g", ["g"]):
        paths = {norm.path for norm in jaxnorm.check_params(tree, "bfloat16", scale_names=names)}
        assert paths == {"q_norm", "input_layernorm", "mlp", "norm"}


def test_models_of_equinox():
    eqx = pytest.importorskip("equinox")

    def layer(key):
        return [
            eqx.nn.RMSNorm(8, use_bias=False),
            eqx.nn.Linear(8, 8, use_bias=False, key=key),
            eqx.nn.LayerNorm((2, 4)),
            eqx.nn.Conv1d(4, 4, 3, key=key),
            eqx.nn.MLP(8, 8, 8, 1, key=key),
            eqx.nn.Embedding(64, 8, key=key),
            eqx.nn.GroupNorm(2, 8),
            eqx.nn.LayerNorm(8, use_weight=False),
        ]

    one = layer(jax.random.key(0))
    stacked = eqx.filter_vmap(layer)(jax.random.split(jax.random.key(0), 3))
    for model in (one, stacked):
        assert names(model) == ["0", "2", "6"]
        assert names({"a": model}) == ["a/0", "a/2", "a/6"]
        assert jaxnorm.check_params(model, jnp.bfloat16).safe
    assert names(one[0]) == ["(root)"]
    zero = eqx.tree_at(lambda norm: (norm.weight, norm.bias), one[2], (jnp.zeros((2, 4)),) * 2)
    assert jaxnorm.check_params(zero, jnp.bfloat16).safe
    zero = eqx.tree_at(lambda norm: norm.bias, zero, jnp.full((2, 4), 1e-6))
    assert not jaxnorm.check_params(zero, jnp.float32).safe


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("bias", [None, 0.0, 1e-6, 1.0, 1e3])
@pytest.mark.parametrize("scale", [1.0, 1e-3, 2.0**-15, 1e-8, 0.0])
def test_conversions_judge_as_it_does(scale, bias, dtype):
    """A converted norm saves its output if check_params calls this safe.

    Otherwise, it saves its input.
    """
    params = {"scale": jnp.ones(8).at[5].set(scale)}
    if bias is not None:
        params["bias"] = jnp.full(8, bias)
    why = conversion.why_input(params.values(), jnp.dtype(dtype))
    assert (why is None) == jaxnorm.check_params(params, dtype).safe
    if why is not None:
        said = "or far below the bias" if bias else f"too small for {dtype}"
        assert said in why
        assert "in 1 of 8 columns" in why or bias == 1e3


# ------------------------------------------------------------- norms followed by rotary embedding


def heads(q, k=None, layers=()):
    scale = jnp.broadcast_to(jnp.asarray(q, jnp.float32), (*layers, len(q)))
    other = jnp.ones(len(q)) if k is None else jnp.asarray(k, jnp.float32)
    return {
        "attention": {"q_norm": {"scale": scale}, "k_norm": {"scale": other}},
        "norm": {"scale": jnp.ones(8)},
    }


def judged(stored, dtype=jnp.bfloat16, **options):
    return {norm.path: norm for norm in jaxnorm.check_params(stored, dtype, **options)}


@pytest.mark.parametrize("name", ["q_norm", "attention/q_norm", "attention.q_norm", ("q_norm",)])
def test_a_rotated_norm_errs_by_its_partners(name):
    stored = heads([1, 1, 1, 1, 8, 1, 1, 1])
    k, q, norm = jaxnorm.check_params(stored, jnp.bfloat16, rotated=name)
    assert q.max_partner_ratio == 8
    assert q.dscale_error == pytest.approx(0.83 * 2**-9 * np.sqrt((1 + 8**2) / 2))
    assert (k.max_partner_ratio, norm.max_partner_ratio) == (None, None)
    assert "max partner/scale" in str(jaxnorm.check_params(stored, jnp.bfloat16, rotated=name))
    assert "max partner/scale" not in str(jaxnorm.check_params(stored, jnp.bfloat16))
    # The other norms' reports are unchanged.
    assert [k, norm] == list(jaxnorm.check_params(stored, jnp.bfloat16))[::2]
    k, _, _ = jaxnorm.check_params(stored, jnp.bfloat16, rotated=("q_norm", "k_norm"))
    assert (k.max_partner_ratio, k.dscale_error) == (1, pytest.approx(0.83 * 2**-9))


def test_a_zero_beside_a_partner_is_lost():
    one, both = [0, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 1, 1, 1]
    for dtype, of_both in [("bfloat16", "safe"), ("float32", "safe"), ("float16", "advised")]:
        for scale, verdict in ((one, "advised"), (both, of_both)):
            report = judged(heads(scale), dtype, rotated="q_norm")
            assert report["attention/q_norm"].verdict.endswith(verdict), (dtype, scale)
        if dtype != "float16":
            assert jaxnorm.check_params(heads(one), dtype).safe
    # With scale_offset=1, as in Gemma, the scale is 1 + the parameter.
    assert jaxnorm.check_params(heads(one), "bfloat16", scale_offset=1, rotated="q_norm").safe


def test_pairs_of_rotated_columns():
    """A rotated pair may consist of one column of each half, or of two neighbouring columns.

    All columns may be rotated, or only the first ones.
    """
    scale = [0, 1, 0, 1, 0, 1, 1, 1]

    def lost(columns, **options):
        found = judged(heads(columns, layers=(3,)), rotated="q_norm", **options)
        assert found["attention/q_norm"].columns == 24
        return found["attention/q_norm"].verdict != "safe"

    assert lost(scale)  # columns 2 and 6 are a pair
    assert lost(scale, interleaved=True)
    assert not lost([0, 1, 1, 1, 0, 1, 1, 1])
    assert lost([0, 1, 1, 1, 0, 1, 1, 1], interleaved=True)
    assert not lost([0, 0, 1, 1, 1, 1, 1, 1], interleaved=True)
    assert not lost([0, 1, 0, 1, 1, 1, 0, 1], rotated_columns=4)
    assert lost([0, 1, 1, 1, 0, 1, 1, 1], rotated_columns=4)
    assert not lost([1, 1, 1, 1, 0, 1, 1, 1], rotated_columns=4, interleaved=True)


EIGHT, SHAPES = heads(np.ones(8)), jax.ShapeDtypeStruct((8,), "float32")


@pytest.mark.parametrize(
    ("stored", "options", "message"),
    [
        (EIGHT, {"dtype": "int8"}, "dtype=int8"),
        (EIGHT, {"dtype": None}, "^check_params: dtype=None is no dtype; expected one of"),
        ({"scale": SHAPES}, {}, "is a ShapeDtypeStruct; expected an array with its values"),
        ({"norm": {"scale": np.ones(3, int)}}, {}, "norm/scale has dtype int64"),
        (
            {"norm": {"scale": np.ones(3), "bias": np.ones(2)}},
            {},
            r"norm has scale of shape \(3,\) and bias of shape \(2,\)",
        ),
        (EIGHT, {"scale_names": 1}, "scale_names is a int; expected names of parameters"),
        (EIGHT, {"rotated": ("q_norm", "norm_q")}, "rotated names 'norm_q'.* no norm ends so; nor"),
        (EIGHT, {"rotated_columns": 10}, "q_norm has 8 columns, and rotated_columns=10; expected"),
        (heads(np.ones(7)), {}, "q_norm has 7 columns, and rotated_columns=None; exp"),
        (EIGHT, {"rotated": [1]}, "rotated has a int; expected names of norms"),
        (EIGHT, {"rotated": 1}, "rotated is a int; expected names of norms"),
        (EIGHT, {"rotated_columns": 4.0}, "rotated_columns=4.0; expected a number of col"),
        (EIGHT, {"interleaved": 1}, "interleaved=1 is a int; expected True or False"),
        (params(), {"rotated": "norm1"}, "rotated names block/norm1, which has a bias; rms_norm_r"),
    ],
)
def test_errors(stored, options, message):
    given = {"dtype": "float32", "rotated": "q_norm", **options}
    with pytest.raises((TypeError, ValueError), match=message):
        jaxnorm.check_params(stored, given.pop("dtype"), **given)
