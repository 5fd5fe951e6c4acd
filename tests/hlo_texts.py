"""Small texts of compiled programs, in the forms that XLA prints, for tests of what reads them."""

from gspmd_mcmc.views.communication import read_report

MESH = {"a": 2, "b": 4}

GROUPS = "channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}"
ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""
PARAMETERS = """
  %p = f32[32]{0} parameter(0)
  %q = bf16[64]{0:T(256)} parameter(1)
  %i = s32[8]{0} parameter(2)
  %token = token[] after-all()"""


def text_of(*lines, before=ADD):
    """A module whose entry has the given lines after a few parameters."""
    body = "\n  ".join(lines)
    head = "HloModule jit_f, is_scheduled=true, num_partitions=8"
    return f"{head}\n\n{before}\nENTRY %main (p: f32[32]) -> f32[32] {{{PARAMETERS}\n  {body}\n}}\n"


def read(*lines, before=ADD):
    return read_report(text_of(*lines, before=before), memory={}, arguments=(), mesh=MESH)


def loop(name, called, trips=None):
    known = f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}' if trips else ""
    return (
        f"%{name} = f32[32]{{0}} while(%p), condition=%cond.{called}, body=%{called}, "
        f'metadata={{op_name="jit(f)/{name}/while"}}{known}'
    )


def computation(name, *lines):
    body = "\n  ".join(lines)
    head = f"%{name} (p: f32[32]) -> f32[32] {{\n  %p = f32[32]{{0}} parameter(0)"
    test = f"%cond.{name} (p: f32[32]) -> pred[] {{\n  ROOT %true = pred[] constant(true)\n}}\n"
    return f"{head}\n  {body}\n}}\n\n{test}\n"


REDUCE = f"ROOT %ar = f32[32]{{0}} all-reduce(%p), {GROUPS}, to_apply=%add"
