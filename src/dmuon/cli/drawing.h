#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace dmuon::cli {

inline constexpr std::string_view kInk = "#1f2933";      ///< text
inline constexpr std::string_view kPaleInk = "#5f6b7a";  ///< text of less weight

struct TextStyle {
  double size = 12;
  std::string_view anchor = "start";  ///< "start", "middle" or "end" is at the given place
  std::string_view fill = kInk;
  bool bold = false;
  bool turned = false;  ///< reads upwards
};

/// `value` with `decimals` digits behind the point, in no locale.
std::string fixed(double value, int decimals);

/// Nanoseconds in milliseconds, "12.345", as `table` writes them.
std::string milliseconds(std::int64_t ns);

/// The first characters of `text`, the last of them an ellipsis where there are more than
/// `max_characters`.
std::string shortened(std::string_view text, std::size_t max_characters);

/// What an estimate takes a character of a sans-serif font of 1 px to be wide, on average.
inline constexpr double kCharacterWidth = 0.58;

/// Builds one SVG document: text and rectangles in pixels, y downwards. Whatever text it is given,
/// the document is well-formed: characters are escaped, what is not UTF-8 or not allowed in XML is
/// replaced.
class Drawing {
 public:
  /// @param tooltip shown under the pointer, none if empty.
  void rect(double x, double y, double width, double height, std::string_view fill,
            std::string_view tooltip = {}, double corner = 0);
  /// @param dashes as stroke-dasharray, solid if empty.
  void line(double x1, double y1, double x2, double y2, std::string_view stroke, double width = 1,
            std::string_view dashes = {});
  /// @param y of the base line.
  void text(double x, double y, std::string_view text, const TextStyle& style = {});

  /// What is drawn until close_group is one element of class `name`.
  void open_group(std::string_view name);
  void close_group();

  /// Everything drawn so far on a white page.
  std::string document(double width, double height, std::string_view title) const;

 private:
  std::string body_;
};

}  // namespace dmuon::cli
