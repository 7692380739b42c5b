#pragma once

namespace async_device {

/// Registers every operator of ATen that has its own kernel for CPUs to run by that kernel, not by
/// a decomposition into others. So values equal the CPU's. Called once, at import.
void prefer_cpu_kernels();

}  // namespace async_device
