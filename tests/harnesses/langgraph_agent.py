"""A graph as people write them with LangGraph: a model node and a tool node, until no tool is called."""

import subprocess
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def bash(command: str) -> str:
    """Run a shell command in the repository."""
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    return f"{done.stdout}{done.stderr}\nexit code {done.returncode}"


model = ChatOpenAI(model=sys.argv[2]).bind_tools([bash])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([bash]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
result = graph.compile().invoke({"messages": [("system", "You fix bugs."), ("user", sys.argv[1])]})
print(result["messages"][-1].content)
