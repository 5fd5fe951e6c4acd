"""What a run warns of and raises."""


class SamplingWarning(UserWarning):
    """Something about a run that its user should look at before trusting it."""


class CheckpointNotSaved(RuntimeError):
    """A run with checkpoints cannot write its first one, so nothing has been computed."""


class Preempted(RuntimeError):
    """The run was told to end (SIGTERM). It is saved; the message says how to continue it."""
