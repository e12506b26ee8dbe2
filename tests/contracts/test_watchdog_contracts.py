"""What Ray says about the death of an actor: all that `verl_tree.launch.run.actors` decides on."""

from ray.core.generated.common_pb2 import ActorDeathCause, ActorDiedErrorContext

from verl_tree.launch.run.actors import NEVER_STARTED, OUT_OF_MEMORY, WANTED


def test_rays_causes_of_a_death_are_these() -> None:
    """A new one ends the run, so whoever moves to another Ray decides whether it should."""
    (oneof,) = ActorDeathCause.DESCRIPTOR.oneofs
    assert {field.name for field in oneof.fields} == {"actor_died_error_context", OUT_OF_MEMORY, *NEVER_STARTED}
    assert len(ActorDeathCause.DESCRIPTOR.fields) == len(oneof.fields), "there is one cause at a time"
    unwanted = {"UNSPECIFIED", "WORKER_DIED", "OWNER_DIED", "NODE_DIED"}
    assert set(ActorDiedErrorContext.Reason.keys()) == WANTED | unwanted


def test_rays_causes_have_texts() -> None:
    texts = {
        field.name: {each.name for each in field.message_type.fields} & {"error_message", "formatted_exception_string"}
        for field in ActorDeathCause.DESCRIPTOR.fields
    }
    assert texts.pop("creation_task_failure_context") == {"formatted_exception_string"}
    assert all(each == {"error_message"} for each in texts.values())
