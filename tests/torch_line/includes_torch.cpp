#include <ATen/core/Tensor.h>

#include "dmuon/core/error.h"
