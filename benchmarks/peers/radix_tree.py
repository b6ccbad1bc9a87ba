"""A radix tree over block ids."""

from collections.abc import Sequence


class Node:
    """A prefix that was inserted, or that two inserted ones share.

    Attributes:
      edge: blocks from the parent to here; empty only at the root.
      depth: blocks from the root to here.
    """

    __slots__ = ("children", "depth", "edge", "parent")

    def __init__(self, edge: tuple[int, ...], parent: "Node | None"):
        self.edge = edge
        self.parent = parent
        self.depth = len(edge) + (parent.depth if parent else 0)
        self.children: dict[int, Node] = {}


class RadixTree:
    """The tree. Nodes are added and removed; how long they stay is the caller's business."""

    def __init__(self):
        self.root = Node((), None)

    def match(self, blocks: Sequence[int]) -> tuple[list[Node], int]:
        """The nodes that are prefixes of `blocks`, shallow first, and how many blocks match, edges included."""
        node, path = self.root, []
        while node.depth < len(blocks) and (child := node.children.get(blocks[node.depth])):
            same = _common(child.edge, blocks[node.depth:node.depth + len(child.edge)])
            if same < len(child.edge):
                return path, node.depth + same
            node = child
            path.append(node)
        return path, node.depth

    def insert(self, blocks: Sequence[int]) -> tuple[Node, list[Node]]:
        """The node of the whole prefix, and the nodes that were made for it: by splitting an edge, or as a new leaf."""
        path, matched = self.match(blocks)
        node = path[-1] if path else self.root
        made = []
        if matched > node.depth:
            node = self._split(node.children[blocks[node.depth]], matched)
            made.append(node)
        if matched < len(blocks):
            leaf = Node(tuple(blocks[matched:]), node)
            node.children[leaf.edge[0]] = leaf
            made.append(leaf)
            node = leaf
        return node, made

    def _split(self, node: Node, depth: int) -> Node:
        """A new node at `depth` on the edge above `node`."""
        parent = node.parent
        cut = depth - parent.depth
        upper = Node(node.edge[:cut], parent)
        parent.children[upper.edge[0]] = upper
        upper.children[node.edge[cut]] = node
        node.edge, node.parent = node.edge[cut:], upper
        return upper

    def remove_leaf(self, node: Node) -> None:
        """Takes a node without children out."""
        del node.parent.children[node.edge[0]]

    def merge_into_child(self, node: Node) -> Node:
        """Takes out a node with one child, which gets its edge; returns the child."""
        (child,) = node.children.values()
        child.edge, child.parent = node.edge + child.edge, node.parent
        node.parent.children[child.edge[0]] = child
        return child


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix."""
    for index, (a, b) in enumerate(zip(one, other)):
        if a != b:
            return index
    return min(len(one), len(other))
