"""torchtitan's program, on CPUs."""

import titan_on_cpu

if __name__ == "__main__":
    titan_on_cpu.train()
