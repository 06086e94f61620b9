"""Draws the pictures of strategies: each .dot file of this folder becomes an .svg file.

pip install pygraphviz && python docs/images/draw.py
"""

from pathlib import Path

from pygraphviz import AGraph

CLASSES = {
    "data": {"fillcolor": "#fff4d6", "color": "#b8860b"},
    "held": {"fillcolor": "#e3f4e3", "color": "#2e7d32"},  # the memory of variables
    "moved": {
        "color": "#c62828",
        "fontcolor": "#c62828",
        "penwidth": "2",
    },  # between replicas
}

for path in sorted(Path(__file__).parent.glob("*.dot")):
    graph = AGraph(str(path))
    graph.graph_attr.update(bgcolor="white", pad="0.2", newrank="true", nodesep="0.7")
    for part in [graph, *graph.subgraphs()]:
        part.graph_attr.update(
            fontname="Helvetica",
            fontsize="13",
            labelloc="b",
            style="rounded",
            color="#888888",
        )
    graph.node_attr.update(
        fontname="Helvetica", fontsize="13", shape="box", style="rounded,filled"
    )
    graph.node_attr.update(fillcolor="#e8eefc", color="#4051b5")
    graph.edge_attr.update(fontname="Helvetica", fontsize="12")
    for item in [*graph.nodes(), *graph.edges()]:
        item.attr.update(CLASSES.get(item.attr["class"], {}))
    graph.draw(path.with_suffix(".svg"), prog="dot")
