//! The places of a source file that can be changed, and the change of each as text around it.

use proc_macro2::Span;
use std::ops::Range;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, BinOp, Expr, Lit, Stmt};

/// The kind of a change, for `--kinds`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// A comparison, a logical or an arithmetic operator.
    Operator,
    /// A condition that is always true, or always false.
    Condition,
    /// A statement that is left out.
    Statement,
    /// A small number that is one larger.
    Number,
    /// A memory ordering that is relaxed; only loom can tell (`--loom`).
    Ordering,
}

/// One change: the text before and after the place, which is in effect if the switch has its number.
#[derive(Clone, Debug)]
pub struct Site {
    pub id: u32,
    pub kind: Kind,
    pub file: String,
    pub line: usize,
    /// The function, and what becomes of what, in words that survive a move within the file.
    pub name: String,
    pub place: Range<usize>,
    pub before: String,
    pub after: String,
}

impl Site {
    /// The name in reports and in the list of argued survivors.
    pub fn key(&self) -> String {
        format!("{} {}", self.file, self.name)
    }
}

/// Returns the changes of `source`, with numbers from `first` on.
///
/// # Errors
/// The source is no Rust.
pub fn find(file: &str, source: &str, first: u32) -> syn::Result<Vec<Site>> {
    let parsed = syn::parse_file(source)?;
    let mut finder = Finder { file, source, next: first, functions: Vec::new(), sites: Vec::new() };
    finder.visit_file(&parsed);
    Ok(finder.sites)
}

struct Finder<'s> {
    file: &'s str,
    source: &'s str,
    next: u32,
    functions: Vec<String>,
    sites: Vec<Site>,
}

/// A call of the switch, as it is written into the source.
fn on(id: u32) -> String {
    format!("crate::pinfold_mutant::on({id})")
}

impl Finder<'_> {
    fn text(&self, span: Span) -> &str {
        &self.source[span.byte_range()]
    }

    fn add(
        &mut self,
        kind: Kind,
        span: Span,
        what: &str,
        around: impl Fn(u32) -> (String, String),
    ) {
        let id = self.next;
        self.next += 1;
        let (before, after) = around(id);
        let within = self.functions.last().map_or("", String::as_str);
        let name = format!("{within}: {what}");
        // A second change that reads the same in one function has a number.
        let same = self
            .sites
            .iter()
            .filter(|site| site.name == name || site.name.starts_with(&format!("{name} #")))
            .count();
        let name = if same == 0 { name } else { format!("{name} #{}", same + 1) };
        self.sites.push(Site {
            id,
            kind,
            file: self.file.to_owned(),
            line: span.start().line,
            name,
            place: span.byte_range(),
            before,
            after,
        });
    }

    /// Replaces an expression by `changed` while the switch is on.
    fn replace(&mut self, kind: Kind, span: Span, what: &str, changed: &str) {
        self.add(kind, span, what, |id| {
            (format!("(if {} {{ {changed} }} else {{ ", on(id)), " })".to_owned())
        });
    }

    fn short(&self, span: Span) -> String {
        let text = self.text(span).split_whitespace().collect::<Vec<_>>().join(" ");
        if text.chars().count() <= 60 {
            text
        } else {
            text.chars().take(57).chain("...".chars()).collect()
        }
    }

    fn condition(&mut self, condition: &Expr, can_be_true: bool) {
        if has_let(condition) {
            return;
        }
        let (span, short) = (condition.span(), self.short(condition.span()));
        if can_be_true {
            self.add(Kind::Condition, span, &format!("`{short}` is true"), |id| {
                (format!("({} || ", on(id)), ")".to_owned())
            });
        }
        self.add(Kind::Condition, span, &format!("`{short}` is false"), |id| {
            (format!("(!{} && (", on(id)), "))".to_owned())
        });
    }
}

fn has_let(expr: &Expr) -> bool {
    match expr {
        Expr::Let(_) => true,
        Expr::Binary(binary) => has_let(&binary.left) || has_let(&binary.right),
        Expr::Paren(paren) => has_let(&paren.expr),
        _ => false,
    }
}

/// Code that the mutated build does not have, or that only tests have.
fn is_left_out(attrs: &[Attribute]) -> bool {
    attrs.iter().any(|attr| {
        let path = attr.path();
        let text = match &attr.meta {
            syn::Meta::List(list) => list.tokens.to_string(),
            _ => String::new(),
        };
        path.is_ident("test")
            || (path.is_ident("cfg")
                && ["test", "loom", "count", "bench", "debug_assertions", "not"]
                    .iter()
                    .any(|word| text.contains(word)))
            || text.contains("naked")
            || path.is_ident("naked")
    })
}

fn changed_operator(op: &BinOp) -> Option<&'static str> {
    Some(match op {
        BinOp::Lt(_) => "<=",
        BinOp::Le(_) => "<",
        BinOp::Gt(_) => ">=",
        BinOp::Ge(_) => ">",
        BinOp::Eq(_) => "!=",
        BinOp::Ne(_) => "==",
        BinOp::And(_) => "||",
        BinOp::Or(_) => "&&",
        BinOp::Add(_) => "-",
        BinOp::Sub(_) => "+",
        BinOp::Mul(_) | BinOp::Rem(_) => "/",
        BinOp::Div(_) => "*",
        BinOp::Shl(_) => ">>",
        BinOp::Shr(_) => "<<",
        BinOp::BitAnd(_) => "|",
        BinOp::BitOr(_) | BinOp::BitXor(_) => "&",
        BinOp::AddAssign(_) => "-=",
        BinOp::SubAssign(_) => "+=",
        BinOp::BitOrAssign(_) => "&=",
        BinOp::BitAndAssign(_) => "|=",
        _ => return None,
    })
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        if !is_left_out(&item.attrs) {
            visit::visit_item_mod(self, item);
        }
    }

    fn visit_item_impl(&mut self, item: &'ast syn::ItemImpl) {
        let of = item
            .trait_
            .as_ref()
            .and_then(|(_, path, _)| Some(path.segments.last()?.ident.to_string()));
        let prints = matches!(of.as_deref(), Some("Debug" | "Display" | "LowerHex" | "Pointer"));
        if !prints && !is_left_out(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_item_fn(&mut self, item: &'ast syn::ItemFn) {
        if item.sig.constness.is_none() && !is_left_out(&item.attrs) {
            self.functions.push(item.sig.ident.to_string());
            self.visit_block(&item.block);
            self.functions.pop();
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if item.sig.constness.is_none() && !is_left_out(&item.attrs) {
            self.functions.push(item.sig.ident.to_string());
            self.visit_block(&item.block);
            self.functions.pop();
        }
    }

    fn visit_trait_item_fn(&mut self, item: &'ast syn::TraitItemFn) {
        if let Some(block) = item.default.as_ref().filter(|_| !is_left_out(&item.attrs)) {
            self.functions.push(item.sig.ident.to_string());
            self.visit_block(block);
            self.functions.pop();
        }
    }

    // Evaluated by the compiler, where there is no switch.
    fn visit_item_const(&mut self, _: &'ast syn::ItemConst) {}
    fn visit_impl_item_const(&mut self, _: &'ast syn::ImplItemConst) {}
    fn visit_trait_item_const(&mut self, _: &'ast syn::TraitItemConst) {}
    fn visit_item_static(&mut self, _: &'ast syn::ItemStatic) {}
    fn visit_item_enum(&mut self, _: &'ast syn::ItemEnum) {}
    fn visit_expr_const(&mut self, _: &'ast syn::ExprConst) {}
    fn visit_type(&mut self, _: &'ast syn::Type) {}
    fn visit_pat(&mut self, _: &'ast syn::Pat) {}
    fn visit_path_arguments(&mut self, _: &'ast syn::PathArguments) {}
    fn visit_attribute(&mut self, _: &'ast Attribute) {}
    fn visit_expr_repeat(&mut self, repeat: &'ast syn::ExprRepeat) {
        self.visit_expr(&repeat.expr);
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        if !is_left_out(&local.attrs) {
            visit::visit_local(self, local);
        }
    }

    fn visit_stmt(&mut self, stmt: &'ast Stmt) {
        if let Stmt::Expr(expr, Some(_)) = stmt {
            let attrs = match expr {
                Expr::MethodCall(call) => Some(&call.attrs),
                Expr::Call(call) => Some(&call.attrs),
                Expr::Assign(assign) => Some(&assign.attrs),
                Expr::Try(tried) => Some(&tried.attrs),
                _ => None,
            };
            if attrs.is_some_and(Vec::is_empty) {
                let what = format!("without `{}`", self.short(expr.span()));
                self.add(Kind::Statement, stmt.span(), &what, |id| {
                    (format!("if !{} {{ ", on(id)), " }".to_owned())
                });
            }
        }
        visit::visit_stmt(self, stmt);
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        // A relaxed fence panics.
        if !matches!(&*call.func, Expr::Path(path) if path.path.segments.last().is_some_and(|last| last.ident == "fence"))
        {
            visit::visit_expr_call(self, call);
        }
    }

    fn visit_expr(&mut self, expr: &'ast Expr) {
        match expr {
            Expr::Binary(binary) if !has_let(expr) => {
                if let Some(op) = changed_operator(&binary.op) {
                    let (left, right) =
                        (self.text(binary.left.span()), self.text(binary.right.span()));
                    let changed = format!("{left} {op} {right}");
                    let what = format!("`{}` with {op}", self.short(expr.span()));
                    self.replace(Kind::Operator, expr.span(), &what, &changed);
                }
            }
            Expr::Unary(unary) if matches!(unary.op, syn::UnOp::Not(_)) => {
                let changed = self.text(unary.expr.span()).to_owned();
                let what = format!("`{}` without !", self.short(expr.span()));
                self.replace(Kind::Operator, expr.span(), &what, &changed);
            }
            Expr::If(branch) => self.condition(&branch.cond, true),
            Expr::While(branch) => self.condition(&branch.cond, false),
            Expr::Lit(syn::ExprLit { lit: Lit::Int(int), .. }) => {
                if let Ok(value) = int.base10_parse::<u64>()
                    && value <= 64
                {
                    let changed = format!("{}{}", value + 1, int.suffix());
                    self.replace(
                        Kind::Number,
                        expr.span(),
                        &format!("`{int}` is {}", value + 1),
                        &changed,
                    );
                }
            }
            Expr::Path(path) => {
                let names: Vec<_> = path
                    .path
                    .segments
                    .iter()
                    .rev()
                    .take(2)
                    .map(|segment| segment.ident.to_string())
                    .collect();
                if names.get(1).is_some_and(|name| name == "Ordering")
                    && ["Acquire", "Release", "AcqRel", "SeqCst"].contains(&names[0].as_str())
                {
                    let relaxed = self.text(expr.span()).replace(&names[0], "Relaxed");
                    self.replace(
                        Kind::Ordering,
                        expr.span(),
                        &format!("{} is Relaxed", names[0]),
                        &relaxed,
                    );
                }
            }
            Expr::MethodCall(call)
                if call.args.len() == 1 && (call.method == "min" || call.method == "max") =>
            {
                let other = if call.method == "min" { "max" } else { "min" };
                let receiver = self.text(call.receiver.span());
                let changed = format!("{receiver}.{other}({})", self.text(call.args[0].span()));
                let what = format!("`{}` with {other}", self.short(expr.span()));
                self.replace(Kind::Operator, expr.span(), &what, &changed);
            }
            _ => {}
        }
        visit::visit_expr(self, expr);
    }
}
