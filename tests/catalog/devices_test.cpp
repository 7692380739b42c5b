#include <gtest/gtest.h>

#include <set>
#include <string>
#include <vector>

#include "dmuon/catalog/catalog.h"
#include "dmuon/plan/cost.h"
#include "tests/plan/message_of.h"

namespace dmuon::catalog {
namespace {

TEST(Devices, AreValidAndSayWhereTheirConstantsComeFrom) {
  const std::vector<std::string> names = device_names();
  EXPECT_EQ(std::set<std::string>(names.begin(), names.end()),
            (std::set<std::string>{"a100-sxm4-80gb", "a800-sxm4-80gb", "cpu", "h100-sxm5-80gb",
                                   "h200-sxm5-141gb", "h800-sxm5-80gb"}));
  EXPECT_EQ(names.size(), 6U);
  for (const std::string& name : names) {
    const plan::Device found = device(name);
    EXPECT_EQ(found.name, name);
    EXPECT_NO_THROW(plan::validate(found));
    EXPECT_GT(found.description.size(), 10U);
    EXPECT_GT(found.source.size(), 20U);
    EXPECT_NO_THROW(network(found.network)) << name;
    // No device's is measured yet. A measured one is no longer a share of its products.
    EXPECT_NEAR(found.training_tflops, 0.8 * found.product_tflops, 0.5) << name;
  }
}

TEST(Devices, AreReadAsTheyStandInTheFile) {
  const plan::Device a800 = device("a800-sxm4-80gb");
  EXPECT_EQ(a800.product_tflops, 195);
  EXPECT_EQ(a800.symmetric_tflops, 217);
  EXPECT_TRUE(a800.after_tune);
  EXPECT_FALSE(device("h100-sxm5-80gb").after_tune);
  EXPECT_EQ(a800.elementwise_gb_per_s, 1600);
  EXPECT_EQ(a800.launch_us, 5);
  EXPECT_EQ(a800.tiles, 108);
  EXPECT_EQ(a800.link_gb_per_s, 150);
  EXPECT_EQ(a800.training_tflops, 156);
  EXPECT_EQ(a800.memory_gb, 85.9);
  EXPECT_EQ(a800.network, "infiniband-200g");
  EXPECT_EQ(device("cpu").symmetric_tflops, 0);  // null: none there
}

TEST(Devices, AreNamedWhenAskedForAnother) {
  const std::string message = plan::message_of([] { device("tpu"); });
  EXPECT_NE(message.find("'tpu'"), std::string::npos) << message;
  for (const std::string& name : device_names()) {
    EXPECT_NE(message.find(name), std::string::npos) << message;
  }
}

TEST(Networks, AreReadAsTheyStandInTheFile) {
  EXPECT_EQ(network_names(), (std::vector<std::string>{"infiniband-200g", "infiniband-400g",
                                                       "ethernet-100g", "ethernet-1g"}));
  for (const std::string& name : network_names()) {
    const plan::Network found = network(name);
    EXPECT_EQ(found.name, name);
    EXPECT_NO_THROW(plan::validate(found));
    EXPECT_GT(found.description.size(), 10U);
    EXPECT_GT(found.source.size(), 20U);
    EXPECT_EQ(found.per_device, name.starts_with("infiniband")) << name;
  }
  EXPECT_EQ(network("infiniband-200g").gb_per_s, 22);
  EXPECT_EQ(network("ethernet-1g").latency_us, 50);
  EXPECT_EQ(plan::message_of([] { network("token-ring"); }),
            "network: expected one of infiniband-200g, infiniband-400g, ethernet-100g, "
            "ethernet-1g; got 'token-ring'");
}

const std::string kNetwork = R"({"name": "n", "description": "", "source": "", )";

TEST(DevicesFromJson, NamesThePlaceOfWhatIsWrong) {
  const std::string before = R"({"schema_version": 1, "networks": [)" + kNetwork +
                             R"("gb_per_s": 1, "latency_us": 0, "per": "node"}],
      "devices": [{"name": "d", "description": "",
      "source": "", "symmetric_tflops": null, "elementwise_gb_per_s": 1, "launch_us": 0,
      "link_gb_per_s": 1, )";
  const auto in_all = [&](const std::string& rest) {
    return plan::message_of([&] { devices_from_json(before + rest + "}]}"); });
  };
  const auto of = [&](const std::string& rest) {
    return in_all(R"("training_tflops": 1, "memory_gb": 1, "network": "n", )" + rest);
  };
  EXPECT_EQ(of(R"("product_tflops": 1, "tiles": 1)"), "");
  EXPECT_EQ(of(R"("product_tflops": 1)"),
            "devices.devices[0]: expected a member 'tiles'; got none");
  EXPECT_NE(of(R"("product_tflops": 1, "tiles": 1.5)").find("devices.devices[0].tiles"),
            std::string::npos);
  EXPECT_NE(of(R"("product_tflops": 1, "tiles": 2097152)").find("tiles"), std::string::npos);
  EXPECT_NE(of(R"("product_tflops": "1", "tiles": 1)").find("product_tflops"), std::string::npos);
  EXPECT_NE(of(R"("product_tflops": 0, "tiles": 1)").find("product_tflops"), std::string::npos);
  EXPECT_NE(of(R"("product_tflops": -1, "tiles": 1)").find("'d'"), std::string::npos);
  const std::string rates = R"("product_tflops": 1, "tiles": 1, )";
  EXPECT_EQ(in_all(rates + R"("memory_gb": 1, "network": "n")"),
            "devices.devices[0]: expected a member 'training_tflops'; got none");
  EXPECT_EQ(in_all(rates + R"("training_tflops": 1, "memory_gb": 0, "network": "n")"),
            "Device 'd': memory_gb must be finite and > 0; got 0");
  EXPECT_EQ(in_all(rates + R"("training_tflops": 1, "memory_gb": 1, "network": "m")"),
            "devices.devices[0].network: expected one of n; got 'm'");
}

TEST(NetworksFromJson, NamesThePlaceOfWhatIsWrong) {
  const auto of = [&](const std::string& rest) {
    return plan::message_of([&] {
      networks_from_json(R"({"schema_version": 1, "networks": [)" + kNetwork + rest + "}]}");
    });
  };
  EXPECT_EQ(of(R"("gb_per_s": 1, "latency_us": 0, "per": "device")"), "");
  EXPECT_EQ(of(R"("gb_per_s": 1, "latency_us": 0)"),
            "devices.networks[0]: expected a member 'per'; got none");
  EXPECT_EQ(of(R"("gb_per_s": 1, "latency_us": 0, "per": "rack")"),
            "devices.networks[0].per: expected one of device, node; got 'rack'");
  EXPECT_EQ(of(R"("gb_per_s": 1, "latency_us": 0, "per": true)"),
            "devices.networks[0].per: expected a string; got true");
  EXPECT_EQ(of(R"("gb_per_s": 0, "latency_us": 0, "per": "node")"),
            "Network 'n': gb_per_s must be finite and > 0; got 0");
  EXPECT_EQ(of(R"("gb_per_s": 1, "latency_us": -1, "per": "node")"),
            "Network 'n': latency_us must be finite and >= 0; got -1");
  EXPECT_EQ(plan::message_of([] { networks_from_json(R"({"schema_version": 1})"); }),
            "devices: expected a member 'networks'; got none");
  EXPECT_EQ(plan::message_of([] { networks_from_json(R"({"schema_version": 2})"); }),
            "devices.schema_version: expected 1; got 2");
}

}  // namespace
}  // namespace dmuon::catalog
