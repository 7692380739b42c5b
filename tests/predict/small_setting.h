#pragma once

#include <string>

#include "dmuon/predict/setting.h"

namespace dmuon::predict {

/// Layers of two matrices on a mesh. Rates are round, so that times can be computed by hand:
/// 10^8 FLOPs take 1 us, 10^6 bytes of memory or of a link take 1 us.
inline Setting small_setting(layout::Mesh mesh, int num_layers = 4,
                             const plan::PlanOptions& options = {}) {
  Setting setting;
  setting.device = {.name = "round",
                    .description = "of a test",
                    .source = "this file",
                    .product_tflops = 100,
                    .symmetric_tflops = 0,
                    .elementwise_gb_per_s = 1000,
                    .launch_us = 0,
                    .tiles = 1,
                    .link_gb_per_s = 1000,
                    .training_tflops = 100,
                    .memory_gb = 80,
                    .network = "round"};
  setting.network = {.name = "round",
                     .description = "of a test",
                     .source = "this file",
                     .gb_per_s = 100,
                     .latency_us = 0,
                     .per_device = true};
  plan::Inventory inventory;
  for (int unit = 0; unit < num_layers; ++unit) {
    for (const char* name : {"up", "down"}) {
      plan::Parameter parameter;
      parameter.name = std::to_string(unit) + "." + name;
      parameter.view.rows = parameter.view.cols = 1000;
      parameter.unit = unit;
      inventory.push_back(parameter);
    }
    setting.training.unit_flops.push_back(2 * 2e6);
    setting.training.attention_flops.push_back(0);
  }
  setting.tokens = 1000;
  setting.owned_host_ms = setting.replicated_host_ms = setting.sharded_host_ms = 0;
  const plan::CostTable costs =
      plan::modelled_costs(plan::group_by_shape(inventory), setting.device);
  setting.plan = plan::make_plan(inventory, mesh, "load_balance", costs, options);
  return setting;
}

inline plan::PlanOptions late() {
  plan::PlanOptions options;
  options.late_updates = true;
  return options;
}

}  // namespace dmuon::predict
