#include <gtest/gtest.h>

#include <set>
#include <string>

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
  }
}

TEST(Devices, AreReadAsTheyStandInTheFile) {
  const plan::Device a800 = device("a800-sxm4-80gb");
  EXPECT_EQ(a800.product_tflops, 195);
  EXPECT_EQ(a800.symmetric_tflops, 217);
  EXPECT_EQ(a800.elementwise_gb_per_s, 1600);
  EXPECT_EQ(a800.launch_us, 5);
  EXPECT_EQ(a800.tiles, 108);
  EXPECT_EQ(a800.link_gb_per_s, 150);
  EXPECT_EQ(device("cpu").symmetric_tflops, 0);  // null: none there
}

TEST(Devices, AreNamedWhenAskedForAnother) {
  const std::string message = plan::message_of([] { device("tpu"); });
  EXPECT_NE(message.find("'tpu'"), std::string::npos) << message;
  for (const std::string& name : device_names()) {
    EXPECT_NE(message.find(name), std::string::npos) << message;
  }
}

TEST(DevicesFromJson, NamesThePlaceOfWhatIsWrong) {
  const std::string before = R"({"schema_version": 1, "devices": [{"name": "d", "description": "",
      "source": "", "symmetric_tflops": null, "elementwise_gb_per_s": 1, "launch_us": 0,
      "link_gb_per_s": 1, )";
  const auto of = [&](const std::string& rest) {
    return plan::message_of([&] { devices_from_json(before + rest + "}]}"); });
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
}

}  // namespace
}  // namespace dmuon::catalog
