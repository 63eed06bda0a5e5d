"""The kernels on a GPU: each line of the forward's table. `test_kernels` has the rest."""

import jax
import pytest
from forward_cases import BF16, F32, call, make_operands, make_spec
from forward_cases import reference as forward_reference
from reference import assert_within

from jaxnorm_kernels.mosaic.device.gpu import active_clusters, local_gpu

pytestmark = pytest.mark.gpu

# Each line of the forward's table: more rows than are few there; the longest are streamed.
FORWARD_COLS = [72, 512, 768, 1000, 1024, 3000, 5120, 8192, 12288, 16384, 32768, 50257, 65536]
FORWARD_COLS += [2**17, 2**18, 300000]


@pytest.mark.parametrize("cols", FORWARD_COLS)
@pytest.mark.parametrize("op", ["softmax", "log_softmax", "layer_norm", "rms_norm"])
@pytest.mark.parametrize(("x", "y"), [(BF16, BF16), (F32, F32), (F32, BF16)], ids=str)
def test_forward_kernels(op, x, y, cols):
    spec = make_spec(op, 137 if cols > 8192 else 1001, cols, x, y)
    operands = make_operands(spec)
    outputs = jax.jit(lambda *args: call(spec, *args))(*operands)
    for output, expected, bound in zip(outputs, *forward_reference(spec, *operands), strict=True):
        assert_within(output, expected, bound)


def test_clusters_are_those_of_the_driver():
    gpu = local_gpu()
    each = [active_clusters(d.local_hardware_id, gpu.smem) for d in jax.local_devices()]
    assert gpu.clusters == {size: min(c[size] for c in each) for size in each[0]}
    for size, count in gpu.clusters.items():
        # A cluster stays within a group of multiprocessors, so that some may be left.
        assert gpu.sms // size / 2 < count <= gpu.sms // size
