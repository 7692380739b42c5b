#pragma once

namespace async_device {

/// Every operator of ATen that has a kernel for CPUs of its own is run by it, rather than by its
/// decomposition into others: so values are those of the CPU. Called once, at import.
void prefer_cpu_kernels();

}  // namespace async_device
