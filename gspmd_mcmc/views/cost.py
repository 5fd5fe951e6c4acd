"""The time of a leapfrog on any number of devices, predicted on paper from a report's traffic."""

from gspmd_mcmc.views.scaling.collective_times import (
    fastest_all_reduce,
    halving_doubling_all_reduce,
    ring_all_reduce,
    tree_all_reduce,
)
from gspmd_mcmc.views.scaling.interconnects import (
    ETHERNET_10G,
    ETHERNET_100G,
    INFINIBAND_HDR,
    INFINIBAND_NDR,
    NVLINK_3,
    NVLINK_4,
    TPU_DCN,
    TPU_V4_ICI,
    TPU_V5E_ICI,
    TPU_V5P_ICI,
    Interconnect,
)
from gspmd_mcmc.views.scaling.prediction import POWERS_OF_TWO, Prediction, fit_compute, predict

__all__ = [
    "ETHERNET_100G",
    "ETHERNET_10G",
    "INFINIBAND_HDR",
    "INFINIBAND_NDR",
    "NVLINK_3",
    "NVLINK_4",
    "POWERS_OF_TWO",
    "TPU_DCN",
    "TPU_V4_ICI",
    "TPU_V5E_ICI",
    "TPU_V5P_ICI",
    "Interconnect",
    "Prediction",
    "fastest_all_reduce",
    "fit_compute",
    "halving_doubling_all_reduce",
    "predict",
    "ring_all_reduce",
    "tree_all_reduce",
]
