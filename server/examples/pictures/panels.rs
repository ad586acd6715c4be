//! A picture of small panels that share their axes, as SVG.
//!
//! There is no background, and all colours are of middle lightness, so that they stand out on white and on black.
//! `prefers-color-scheme` would ask the system, not the page that the picture is on.

#![expect(clippy::float_arithmetic, reason = "places on paper, not decisions")]

const TEXT: &str = "#777c85";
const RULE: &str = "#8a8f98";
const BEHIND: &str = "#9aa0a8";
const FRONT: &str = "#3d85d1";
const EXCESS: &str = "#dd6b20";

const COLUMNS: u16 = 2;
const WIDTH: f64 = 880.0;
const LEFT: f64 = 52.0;
const GAP: f64 = 50.0;
const TOP: f64 = 64.0;
const PLOT: (f64, f64) = (380.0, 112.0);
/// From the top of one panel to that of the next.
const PITCH: f64 = 168.0;

pub(crate) struct Picture {
    pub(crate) title: &'static str,
    pub(crate) about: &'static str,
    /// Title, from, to, step of the ticks.
    pub(crate) x: (&'static str, i32, i32, i32),
    pub(crate) y: Y,
    /// How much of the x axis a value takes.
    pub(crate) bin: f64,
    /// Values are a line over time, not bars.
    pub(crate) stepped: bool,
    pub(crate) panels: Vec<Panel>,
}

pub(crate) struct Y {
    pub(crate) title: &'static str,
    pub(crate) most: u32,
    pub(crate) step: u32,
    /// A dashed line and its name.
    pub(crate) line: (u32, &'static str),
    /// What is above this is marked.
    pub(crate) excess: Option<u32>,
}

pub(crate) struct Panel {
    pub(crate) name: &'static str,
    pub(crate) note: String,
    pub(crate) behind: Vec<u64>,
    pub(crate) front: Vec<u64>,
}

impl Picture {
    pub(crate) fn drawn(&self) -> String {
        let columns = usize::from(COLUMNS);
        let rows = u16::try_from(self.panels.len().div_ceil(columns)).unwrap_or(u16::MAX);
        let height = TOP + f64::from(rows) * PITCH + 20.0;
        let mut lines = vec![
            format!(
                r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img" font-family="system-ui, 'DejaVu Sans', sans-serif" font-size="12" fill="{TEXT}">"#
            ),
            format!("<title>{}</title>", self.title),
            format!("<desc>{}</desc>", self.about),
            text(LEFT, 18.0, r#"font-size="15" font-weight="bold""#, self.title),
            text(LEFT, 38.0, "", self.about),
        ];
        let places = (0..rows).flat_map(|row| (0..COLUMNS).map(move |column| (row, column)));
        for ((row, column), panel) in places.zip(&self.panels) {
            let x = LEFT + f64::from(column) * (PLOT.0 + GAP);
            let y = TOP + f64::from(row) * PITCH + 22.0;
            lines.push(format!(r#"<g transform="translate({x} {y})">"#));
            self.panel(panel, &mut lines);
            // Panels share their axes.
            if column == 0 {
                self.y_title(&mut lines);
            }
            if row + 1 == rows {
                self.x_title(&mut lines);
            }
            lines.push("</g>".into());
        }
        lines.push("</svg>\n".into());
        lines.join("\n")
    }

    fn panel(&self, panel: &Panel, lines: &mut Vec<String>) {
        let (width, height) = PLOT;
        let bold = r#"font-size="13" font-weight="bold""#;
        lines.push(text(0.0, -8.0, bold, panel.name));
        lines.push(text(width, -8.0, r#"text-anchor="end""#, &panel.note));

        lines.push(self.shape(&panel.behind, None, BEHIND, 0.4));
        lines.push(self.shape(&panel.front, None, FRONT, 1.0));
        if let Some(above) = self.y.excess {
            lines.push(self.shape(&panel.front, Some(above), EXCESS, 1.0));
        }

        let (line, name) = self.y.line;
        let at = self.y(line.into());
        lines.push(format!(
            r#"<path d="M0 {at}H{width}" stroke="{TEXT}" stroke-dasharray="4 3" fill="none"/>"#
        ));
        lines.push(text(width - 2.0, at - 4.0, r#"text-anchor="end""#, name));

        lines.push(format!(r#"<path d="M0 0V{height}H{width}" stroke="{RULE}" fill="none"/>"#));
        let mut tick = 0;
        while tick <= self.y.most {
            let at = self.y(tick.into());
            lines.push(format!(r#"<path d="M-4 {at}H0" stroke="{RULE}"/>"#));
            lines.push(text(-8.0, at + 4.0, r#"text-anchor="end""#, &tick.to_string()));
            tick += self.y.step;
        }
        let (_, from, to, step) = self.x;
        let mut tick = from;
        while tick <= to {
            let at = self.x(f64::from(tick - from));
            lines.push(format!(r#"<path d="M{at} {height}v4" stroke="{RULE}"/>"#));
            lines.push(text(at, height + 17.0, r#"text-anchor="middle""#, &tick.to_string()));
            tick += step;
        }
    }

    fn y_title(&self, lines: &mut Vec<String>) {
        let middle = PLOT.1 / 2.0;
        let turned = format!(r#"text-anchor="middle" transform="rotate(-90 -36 {middle})""#);
        lines.push(text(-36.0, middle, &turned, self.y.title));
    }

    fn x_title(&self, lines: &mut Vec<String>) {
        lines.push(text(PLOT.0 / 2.0, PLOT.1 + 34.0, r#"text-anchor="middle""#, self.x.0));
    }

    /// An area under the values, or what of it is above a value.
    fn shape(&self, values: &[u64], above: Option<u32>, colour: &str, opacity: f64) -> String {
        let foot = self.y(above.map_or(0, u64::from));
        let place = |i: u32, value: u64| {
            let start = f64::from(i) * self.bin;
            (self.x(start), self.x(start + self.bin), self.y(value).min(foot))
        };
        let places = (0..).zip(values).map(|(i, &value)| place(i, value));
        let path = if self.stepped {
            let steps: Vec<_> = places.map(|(_, right, top)| format!("V{top}H{right}")).collect();
            format!("M0 {foot}{}V{foot}z", steps.concat())
        } else {
            // A gap between two.
            let bar = |(left, right, top)| format!("M{left} {foot}V{top}H{}V{foot}z", rounded(right - 1.0));
            places.filter(|&(_, _, top)| top < foot).map(bar).collect::<Vec<_>>().concat()
        };
        format!(r#"<path d="{path}" fill="{colour}" fill-opacity="{opacity}"/>"#)
    }

    fn x(&self, value: f64) -> f64 {
        let (_, from, to, _) = self.x;
        rounded(value / f64::from(to - from) * PLOT.0)
    }

    fn y(&self, value: u64) -> f64 {
        let value = f64::from(u32::try_from(value).unwrap_or(u32::MAX));
        rounded((1.0 - value / f64::from(self.y.most)) * PLOT.1)
    }
}

/// To a tenth, which is enough on paper.
fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

fn text(x: f64, y: f64, more: &str, text: &str) -> String {
    let space = if more.is_empty() { "" } else { " " };
    format!(r#"<text x="{x}" y="{y}"{space}{more}>{text}</text>"#)
}
