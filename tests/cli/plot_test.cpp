#include "dmuon/cli/plot.h"

#include <gtest/gtest.h>

#include <locale>
#include <string>
#include <string_view>
#include <vector>

#include "dmuon/core/error.h"

namespace dmuon::cli {
namespace {

// Of shapes that take turns.
plan::Inventory inventory_of(int num_matrices, int num_shapes = 2) {
  plan::Inventory inventory;
  for (int w = 0; w < num_matrices; ++w) {
    inventory.push_back({"layers." + std::to_string(w), 256 + 64 * (w % num_shapes), 128, w / 4});
  }
  return inventory;
}

plan::Plan plan_of(const plan::Inventory& inventory, plan::Mesh mesh,
                   std::string_view strategy = "load_balance") {
  const plan::Device device = {"a800", "", "", 195, 217, 1600, 5, 108, 150};
  plan::CostTable costs =
      plan::modelled_costs(plan::group_by_shape(inventory), device, mesh.tensor_parallel);
  costs.source = "model of a800";
  return plan::make_plan(inventory, mesh, strategy, costs);
}

std::size_t count(std::string_view text, std::string_view part) {
  std::size_t found = 0;
  for (auto at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) {
    ++found;
  }
  return found;
}

// The name an element's tag starts with: "rect" of "rect x=...".
std::string_view name_of(std::string_view tag) { return tag.substr(0, tag.find_first_of(" /")); }

// Whether text between tags, or inside quotes of a tag, starts no tag and no unknown entity.
bool is_plain(std::string_view text) {
  for (auto at = text.find('&'); at != std::string_view::npos; at = text.find('&', at + 1)) {
    bool known = false;
    for (const std::string_view entity : {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"}) {
      known = known || text.substr(at).starts_with(entity);
    }
    if (!known) return false;
  }
  for (const char c : text) {
    if (c == '<' || c == '>' || (static_cast<unsigned char>(c) < 0x20 && c != '\n')) return false;
  }
  return true;
}

// Tags are balanced around one root element, quotes are paired, all text is escaped.
testing::AssertionResult is_well_formed(std::string_view text) {
  std::vector<std::string_view> open;
  while (!text.empty()) {
    const auto from = text.find('<');
    if (!is_plain(text.substr(0, from)))
      return testing::AssertionFailure() << "text before " << from;
    if (from == std::string_view::npos) break;
    const auto to = text.find('>', from);
    if (to == std::string_view::npos) return testing::AssertionFailure() << "a tag does not end";
    const std::string_view tag = text.substr(from + 1, to - from - 1);
    if (!is_plain(tag) || count(tag, "\"") % 2 != 0) return testing::AssertionFailure() << tag;
    if (tag.front() == '/') {
      if (open.empty() || open.back() != tag.substr(1)) return testing::AssertionFailure() << tag;
      open.pop_back();
      if (open.empty() && text.substr(to + 1) != "\n") {
        return testing::AssertionFailure() << "something follows the root";
      }
    } else if (tag.back() != '/') {
      open.push_back(name_of(tag));
    }
    text.remove_prefix(to + 1);
  }
  if (!open.empty()) return testing::AssertionFailure() << open.back() << " is not closed";
  return testing::AssertionSuccess();
}

TEST(Svg, IsWellFormedAndHasABarForEveryOwnerOnEveryMesh) {
  const plan::Inventory inventory = inventory_of(30);
  for (const plan::Mesh mesh :
       {plan::Mesh{1, 1}, plan::Mesh{1, 8}, plan::Mesh{4, 8}, plan::Mesh{8, 16}, plan::Mesh{32, 8},
        plan::Mesh{1, 100}, plan::Mesh{3, 70}, plan::Mesh{2, 4, 2}, plan::Mesh{9, 2, 4}}) {
    for (const std::string_view strategy : {"load_balance", "rank0", "round_robin"}) {
      const std::string text = svg(plan_of(inventory, mesh, strategy), "a plan");
      EXPECT_TRUE(is_well_formed(text)) << mesh.num_replicates << " x " << mesh.num_shards;
      EXPECT_EQ(count(text, "<g class=\"bar\">"), static_cast<std::size_t>(mesh.num_owners()));
      EXPECT_EQ(text.find("nan"), std::string::npos);
      EXPECT_EQ(text.find("inf"), std::string::npos);
    }
  }
}

TEST(Svg, SaysWhatThePlanTakesAndWhereTheBoundIs) {
  plan::Plan plan = plan_of(inventory_of(30), {2, 4});
  plan.loads_ns.assign(8, 2'000'000);
  plan.certificate.bound = 1'600'000;
  const std::string text = svg(plan, "a plan");
  EXPECT_NE(text.find(">a plan</text>"), std::string::npos);
  EXPECT_NE(text.find(">load_balance on a mesh of 2 x 4: 30 matrices in "), std::string::npos);
  EXPECT_NE(text.find(">makespan 2.000 ms, bound 1.600 ms, gap 25.00 %</text>"), std::string::npos);
  EXPECT_NE(text.find(">costs: model of a800</text>"), std::string::npos);
  EXPECT_EQ(count(text, "<g class=\"bound\">"), 1U);
  EXPECT_EQ(count(text, "stroke-dasharray"), 1U);
  EXPECT_NE(text.find(">1.600 ms</text>"), std::string::npos);
}

TEST(Svg, ShowsEveryMatrixOfASmallMeshAndLoadsOfALargeOne) {
  const std::string small = svg(plan_of(inventory_of(30), {4, 8}), "");
  EXPECT_EQ(count(small, "<g class=\"slot\">"), 32U);
  EXPECT_EQ(count(small, "<title>layers."), 30U);
  EXPECT_EQ(count(small, "<g class=\"map\">"), 0U);
  const std::string large = svg(plan_of(inventory_of(30), {16, 8}), "");
  EXPECT_EQ(count(large, "<g class=\"slot\">"), 0U);
  EXPECT_EQ(count(large, "<title>node "), 128U);
  EXPECT_NE(large.find("<title>node 15, shard 7, owner 127: "), std::string::npos);
}

TEST(Svg, PutsTheTimeOfEveryShapeIntoItsTooltip) {
  plan::Inventory inventory = {{"a", 4, 4, 0}, {"b", 4, 4, 0}, {"c", 8, 4, 1}};
  const plan::CostTable costs = {
      "by hand", {{{4, 4}, {{1, 3'000'000}, {2, 4'500'000}}}, {{8, 4}, {{1, 7'000'000}}}}};
  const std::string text = svg(plan::make_plan(inventory, {1, 2}, "rank0", costs), "");
  EXPECT_NE(text.find("<title>owner 0, 4 x 4: 2 matrices, 4.500 ms</title>"), std::string::npos);
  EXPECT_NE(text.find("<title>owner 0, 8 x 4: 1 matrix, 7.000 ms</title>"), std::string::npos);
  EXPECT_EQ(text.find("<title>owner 1,"), std::string::npos);
  EXPECT_NE(text.find(">8 x 4 (1)</text>"), std::string::npos);
}

TEST(Svg, SharesAColourAmongTheSmallestOfManyShapes) {
  const std::string text = svg(plan_of(inventory_of(60, 20), {1, 4}), "");
  EXPECT_TRUE(is_well_formed(text));
  EXPECT_NE(text.find(">other, 7 shapes (21)</text>"), std::string::npos);
}

TEST(Svg, MergesTheBarsAndCellsOfAHugeMesh) {
  const std::string text = svg(plan_of(inventory_of(30), {1024, 8}, "round_robin"), "");
  EXPECT_TRUE(is_well_formed(text));
  EXPECT_EQ(count(text, "<g class=\"bar\">"), 1024U);
  EXPECT_NE(text.find(">owner (a bar is the slowest of 8)</text>"), std::string::npos);
  EXPECT_LT(text.size(), 1'000'000U);
}

TEST(Svg, EscapesAHostileTitleNameAndSource) {
  plan::Plan plan = plan_of({{"</title><script>&\"'", 4, 4, 0}}, {1, 2});
  plan.costs.source = "<b>&amp;";
  const std::string text = svg(plan, "</svg><script>alert(\"1\")</script>&'\x01\xff");
  EXPECT_TRUE(is_well_formed(text));
  EXPECT_EQ(text.find("<script"), std::string::npos);
  EXPECT_NE(text.find("&lt;/title&gt;&lt;script&gt;&amp;&quot;&#39;, 4 x 4, owner "),
            std::string::npos);
  EXPECT_NE(text.find("&amp;&#39;\xEF\xBF\xBD\xEF\xBF\xBD</title>"), std::string::npos);
  EXPECT_NE(text.find("costs: &lt;b&gt;&amp;amp;"), std::string::npos);
}

TEST(Svg, CutsALongTitleBetweenCharacters) {
  std::string title;
  for (int i = 0; i < 300; ++i) title += "\xC3\xA9";  // two bytes each
  const std::string text = svg(plan_of({}, {1, 1}), title);
  EXPECT_NE(text.find("\xC3\xA9\xE2\x80\xA6</text>"), std::string::npos);
  EXPECT_EQ(text.find("\xEF\xBF\xBD"), std::string::npos);
}

// A locale that groups digits and has a decimal comma.
struct Comma : std::numpunct<char> {
  char do_decimal_point() const override { return ','; }
  char do_thousands_sep() const override { return '.'; }
  std::string do_grouping() const override { return "\1"; }
};

TEST(Svg, IsTheSameTwiceAndInEveryLocale) {
  const plan::Plan plan = plan_of(inventory_of(30), {4, 8});
  const std::string text = svg(plan, "a plan");
  EXPECT_EQ(svg(plan, "a plan"), text);
  const std::locale before = std::locale::global(std::locale(std::locale(), new Comma));
  const std::string elsewhere = svg(plan, "a plan");
  std::locale::global(before);
  EXPECT_EQ(elsewhere, text);
}

TEST(Svg, DrawsWhatHasNoMatricesOrTakesNoTime) {
  for (const plan::Mesh mesh : {plan::Mesh{2, 4}, plan::Mesh{32, 8}}) {
    const std::string text = svg(plan_of({}, mesh), "nothing");
    EXPECT_TRUE(is_well_formed(text));
    EXPECT_EQ(text.find("gap"), std::string::npos);
    const plan::CostTable free = {"free", {{{4, 4}, {{1, 0}}}}};
    EXPECT_TRUE(is_well_formed(svg(plan::make_plan({{"a", 4, 4, 0}}, mesh, "lpt", free), "")));
  }
  EXPECT_TRUE(is_well_formed(svg(plan::Plan{}, "")));
}

TEST(Svg, RejectsAPlanWithoutTheTimeOfABatch) {
  plan::Plan plan = plan_of(inventory_of(30), {1, 2});
  plan.costs.shapes.pop_back();
  EXPECT_THROW(svg(plan, ""), core::InvalidArgument);
}

}  // namespace
}  // namespace dmuon::cli
