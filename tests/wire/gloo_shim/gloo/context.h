#pragma once

#include "gloo/types.h"
