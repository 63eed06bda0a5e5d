"""Low-level helpers of the kernels: launches, register layouts, barriers and PTX instructions."""
