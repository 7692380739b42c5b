#include "dmuon/cli/drawing.h"

#include <algorithm>
#include <array>
#include <charconv>

#include "dmuon/core/error.h"

namespace dmuon::cli {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";  // U+FFFD
constexpr std::string_view kEllipsis = "\xE2\x80\xA6";

// Bytes of the character at the front of `text`, 0 if it is no UTF-8: a stray or missing
// continuation, a longer form than needed, a surrogate, or above U+10FFFF.
std::size_t character_bytes(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned first = byte(0);
  if (first < 0x80) return 1;
  const std::size_t size = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || text.size() < size) return 0;
  for (std::size_t i = 1; i < size; ++i) {
    if ((byte(i) & 0xC0) != 0x80) return 0;
  }
  const bool bad = (first == 0xE0 && byte(1) < 0xA0) || (first == 0xED && byte(1) >= 0xA0) ||
                   (first == 0xF0 && byte(1) < 0x90) || (first == 0xF4 && byte(1) >= 0x90);
  return bad ? 0 : size;
}

std::string_view escape_of(std::string_view character) {
  const char c = character.front();
  if (c == '&') return "&amp;";
  if (c == '<') return "&lt;";
  if (c == '>') return "&gt;";
  if (c == '"') return "&quot;";
  if (c == '\'') return "&#39;";
  if (c == '\t' || c == '\n' || c == '\r') return " ";
  // No XML 1.0 document may hold these, escaped or not.
  const bool banned = (static_cast<unsigned char>(c) < 0x20) || character == "\xEF\xBF\xBE" ||
                      character == "\xEF\xBF\xBF";
  return banned ? kReplacement : character;
}

std::string escaped(std::string_view text) {
  std::string result;
  while (!text.empty()) {
    const std::size_t size = character_bytes(text);
    result += size == 0 ? kReplacement : escape_of(text.substr(0, size));
    text.remove_prefix(size == 0 ? 1 : size);
  }
  return result;
}

// Hundredths of a pixel are enough; whole numbers are written as such.
std::string pixels(double value) {
  std::string text = fixed(value, 2);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text;
}

std::string attribute(std::string_view name, std::string_view value) {
  return core::message(" ", name, "=\"", value, "\"");
}

}  // namespace

std::string fixed(double value, int decimals) {
  // The largest double has 309 digits before the point.
  std::array<char, 400> buffer{};
  const auto end = std::to_chars(buffer.data(), buffer.data() + buffer.size(), value,
                                 std::chars_format::fixed, decimals);
  return {buffer.data(), end.ptr};
}

std::string milliseconds(std::int64_t ns) { return fixed(static_cast<double>(ns) / 1e6, 3); }

std::string shortened(std::string_view text, std::size_t max_characters) {
  std::size_t bytes = 0;
  std::size_t cut = 0;  // where the last character that may stay begins
  for (std::size_t count = 0; bytes < text.size(); ++count) {
    if (count + 1 == max_characters) cut = bytes;
    if (count == max_characters) return std::string(text.substr(0, cut)).append(kEllipsis);
    bytes += std::max<std::size_t>(1, character_bytes(text.substr(bytes)));
  }
  return std::string(text);
}

void Drawing::rect(double x, double y, double width, double height, std::string_view fill,
                   std::string_view tooltip, double corner) {
  body_ += "<rect" + attribute("x", pixels(x)) + attribute("y", pixels(y)) +
           attribute("width", pixels(width)) + attribute("height", pixels(height)) +
           attribute("fill", fill);
  if (corner > 0) body_ += attribute("rx", pixels(corner));
  if (tooltip.empty()) {
    body_ += "/>\n";
  } else {
    body_ += "><title>" + escaped(tooltip) + "</title></rect>\n";
  }
}

void Drawing::line(double x1, double y1, double x2, double y2, std::string_view stroke,
                   double width, std::string_view dashes) {
  body_ += "<line" + attribute("x1", pixels(x1)) + attribute("y1", pixels(y1)) +
           attribute("x2", pixels(x2)) + attribute("y2", pixels(y2)) + attribute("stroke", stroke) +
           attribute("stroke-width", pixels(width));
  if (!dashes.empty()) body_ += attribute("stroke-dasharray", dashes);
  body_ += "/>\n";
}

void Drawing::text(double x, double y, std::string_view text, const TextStyle& style) {
  body_ += "<text" + attribute("x", pixels(x)) + attribute("y", pixels(y)) +
           attribute("font-size", pixels(style.size)) + attribute("fill", style.fill);
  if (style.anchor != "start") body_ += attribute("text-anchor", style.anchor);
  if (style.bold) body_ += attribute("font-weight", "600");
  if (style.turned) {
    body_ += attribute("transform", core::message("rotate(-90 ", pixels(x), " ", pixels(y), ")"));
  }
  body_ += ">" + escaped(text) + "</text>\n";
}

void Drawing::open_group(std::string_view name) {
  body_ += "<g" + attribute("class", name) + ">\n";
}

void Drawing::close_group() { body_ += "</g>\n"; }

std::string Drawing::document(double width, double height, std::string_view title) const {
  const std::string w = pixels(width);
  const std::string h = pixels(height);
  return core::message(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"", w, "\" height=\"", h,
      "\" viewBox=\"0 0 ", w, " ", h,
      "\" role=\"img\" font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica "
      "Neue', Arial, 'DejaVu Sans', sans-serif\">\n<title>",
      escaped(title), "</title>\n<rect width=\"100%\" height=\"100%\" fill=\"#ffffff\"/>\n", body_,
      "</svg>\n");
}

}  // namespace dmuon::cli
