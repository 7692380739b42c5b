"""Plans, costs and the catalog in C++; its headers under src/dmuon say what each call does."""

from collections.abc import Sequence

__version__: str

class Parameter:
    name: str
    rows: int
    cols: int
    unit: int
    tensor_parallel: bool
    def __init__(self, name: str, rows: int, cols: int, unit: int, tensor_parallel: bool = False) -> None: ...
    def shape_text(self) -> str: ...

class Mesh:
    num_replicates: int
    num_shards: int
    tensor_parallel: int
    def __init__(self, num_replicates: int, num_shards: int, tensor_parallel: int = 1) -> None: ...
    def num_owners(self) -> int: ...
    def shard_of(self, owner: int) -> int: ...
    def replicate_of(self, owner: int) -> int: ...

class StepOptions:
    node_copy: bool
    lookahead: int
    max_units_in_flight: int
    reshard_after_forward: bool
    broadcast_before_reduce: bool
    asynchronous: bool

class PlanOptions:
    def __init__(self, step: StepOptions = ...) -> None: ...
    lookahead: int
    layout_slack: float
    max_memory_bytes: int
    weight_bytes: int
    gradient_bytes: int
    node_copy: bool
    units_in_flight: int

class CostTable:
    source: str
    def __init__(self, source: str, entries: Sequence[tuple[tuple[int, int], Sequence[tuple[int, int]]]]) -> None: ...
    def batches(self, matrix: Parameter) -> list[tuple[int, int]]: ...
    def to_json(self) -> str: ...
    @staticmethod
    def from_json(text: str) -> CostTable: ...

class Spread:
    distinct_columns: float
    repeats: float
    busiest_column: float
    column_bytes: list[int]

class Plan:
    mesh: Mesh
    strategy: str
    options: PlanOptions
    inventory: list[Parameter]
    owner: list[int]
    batches: list[tuple[int, list[int]]]
    loads_ns: list[int]
    makespan_ns: int
    bound_ns: int
    gap: float
    memory_bytes: list[int]
    state_bytes: list[int]
    spread: Spread
    costs: CostTable
    def to_json(self) -> str: ...
    @staticmethod
    def from_json(text: str) -> Plan: ...
    def require_fit(self, inventory: list[Parameter], mesh: Mesh) -> None: ...
    def hash(self) -> int: ...

class Model:
    name: str
    description: str
    source: str
    stand_in: bool
    inventory: list[Parameter]

def candidate_batches(rows: int, cols: int, num_matrices: int) -> list[int]: ...
def modelled_ns(device: str, rows: int, cols: int, num_batch: int) -> int: ...
def modelled_costs(inventory: list[Parameter], device: str, tensor_parallel: int = 1) -> CostTable: ...
def device_names() -> list[str]: ...
def model_names() -> list[str]: ...
def model(name: str) -> Model: ...
def model_from_json(text: str) -> Model: ...
def make_plan(
    inventory: list[Parameter], mesh: Mesh, strategy: str, costs: CostTable, options: PlanOptions
) -> Plan: ...
def make_plan_from_counts(
    inventory: list[Parameter],
    mesh: Mesh,
    strategy: str,
    counts: list[list[int]],
    costs: CostTable,
    options: PlanOptions,
) -> Plan: ...
def strategy_names() -> list[str]: ...
