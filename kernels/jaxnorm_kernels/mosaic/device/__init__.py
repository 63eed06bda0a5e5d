"""Functions close to the device: launches, register layouts, barriers and clusters."""
