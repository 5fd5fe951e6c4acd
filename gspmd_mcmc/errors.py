"""What a run warns of and raises."""


class SamplingWarning(UserWarning):
    """Something about a run that its user should look at before trusting it."""


class CheckpointNotSaved(RuntimeError):
    """A run that was to have checkpoints cannot write its first one; nothing has been computed."""


class Preempted(RuntimeError):
    """The run was told to end (SIGTERM). What it had done is saved; the message says how to go on."""
