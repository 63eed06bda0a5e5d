"""A user's code, which `test_public.py` checks with mypy. Errors that mypy must find are marked."""

import jax
import jax.numpy as jnp
from flax import nnx

import jaxnorm
import jaxnorm.linen
import jaxnorm.nnx

x = jnp.ones((4, 16))
param = nnx.Param(jnp.ones(16))

y: jax.Array = jaxnorm.rms_norm(x, param)
y = jaxnorm.layer_norm(x, param, bias=param, save="input", implementation="xla")
y = jaxnorm.softmax(x, (0, -1), where=x > 0, dtype=jnp.bfloat16)
y = jaxnorm.log_softmax(x, scale=0.5, bias=jnp.zeros(16), causal=True)
labels = jnp.zeros(4, int)
y = jaxnorm.softmax_cross_entropy_with_integer_labels(x, labels, where=labels > 0, z_loss=1e-4)
weight = jnp.ones((16, 8))
y = jaxnorm.rms_norm_linear(x, weight, param, activation="gelu")
y, h = jaxnorm.rms_norm_linear(x, weight, param, residual=x)
y = jaxnorm.rms_norm_linear(x, weight, activation="tanh")  # type: ignore[call-overload]
y = jaxnorm.gated_linear(x, x, weight, bias=jnp.zeros(8), activation="gelu", dtype=jnp.bfloat16)
y = jaxnorm.gated_linear(x, x, weight, activation=jnp.tanh, product=lambda h, w: h @ w)
y = jaxnorm.activation_linear(x, param, bias=param, out_sharding=None)
y = jaxnorm.activation_linear(x, weight, activation="tanh")  # type: ignore[arg-type]
y = jaxnorm.activation_linear(x, weight, out_sharding="data")  # type: ignore[arg-type]
y = jaxnorm.rms_norm(x, save="both")  # type: ignore[arg-type]
y = jaxnorm.rms_norm(x, implementation="cudnn")  # type: ignore[arg-type]
y = jaxnorm.rms_norm(x, eps=1e-5)  # type: ignore[call-arg]

rngs = nnx.Rngs(0)
norm = jaxnorm.nnx.RMSNorm(16, epsilon=1e-5, scale_offset=1.0, rngs=rngs)
same: jaxnorm.nnx.RMSNorm = jaxnorm.nnx.convert(norm, save="input")
jaxnorm.nnx.convert(norm, implementation="cudnn")  # type: ignore[arg-type]
with jaxnorm.linen.converted(implementation="xla", params={"norm": {"scale": x}}):
    pass
jaxnorm.linen.converted(save="both")  # type: ignore[arg-type]
module = jaxnorm.linen.RMSNorm(epsilon=1e-5, implementation="mosaic", scale_offset=1.0)
jaxnorm.linen.LayerNorm(implementation="cudnn")  # type: ignore[arg-type]

plan: jaxnorm.Plan = jaxnorm.implementation_for("rms_norm", (8, 128), jnp.float32)
choice: jaxnorm.Choice = plan.forward
