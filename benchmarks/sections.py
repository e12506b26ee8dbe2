"""The section of a forest that sees the longest context, as a plan: what relayed trees ask of attention."""

from verl_tree.attention import AttentionPlan
from verl_tree.relay.cut import cut
from verl_tree.tree.layout import TreeLayout


def longest_context(layout: TreeLayout, *, capacity: int) -> AttentionPlan:
    """Cut a layout into sections of at most `capacity` tokens and return the plan of that with the longest context."""
    tree = (layout.subtree_end_T.cpu().numpy(), layout.position_T.cpu().numpy())
    sections = cut(*tree, capacity=capacity, section_cost=0).sections
    section = max(sections, key=lambda section: section.num_context)
    device = layout.subtree_end_T.device
    return AttentionPlan.from_subtree_end(section.subtree_end, device=device, num_context=section.num_context)
