//! The man page: one for the program and all its commands, from the definition of the command line.

use clap::Command;
use clap_mangen::Man;
use std::io;

/// Renders the page.
pub(crate) fn page(mut cli: Command) -> io::Result<Vec<u8>> {
    cli.build();
    let mut page = Vec::new();
    let man = Man::new(cli.clone());
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_options_section(&mut page)?;
    for command in cli.get_subcommands().filter(|command| command.get_name() != "help") {
        heading(&mut page, &format!("COMMAND {}", command.get_name().to_uppercase()));
        let man = Man::new(command.clone());
        man.render_description_section(&mut page)?;
        man.render_synopsis_section(&mut page)?;
        man.render_options_section(&mut page)?;
        notes(&mut page, command);
    }
    heading(&mut page, "ALL COMMANDS");
    notes(&mut page, &cli);
    Ok(page)
}

fn heading(page: &mut Vec<u8>, text: &str) {
    page.extend_from_slice(format!(".SH \"{text}\"\n").as_bytes());
}

/// Writes what `--help` prints after the options: paragraphs are filled, and indented as they are
/// there.
fn notes(page: &mut Vec<u8>, command: &Command) {
    let Some(text) = command.get_after_long_help() else { return };
    page.extend_from_slice(b".SS NOTES\n");
    for line in text.to_string().lines() {
        let text = line.trim_start();
        let indent = line.len() - text.len();
        let line = match (text.is_empty(), indent) {
            (true, _) => ".sp\n".to_owned(),
            (false, 0) => format!(".br\n{}\n", escaped(text)),
            (false, _) => format!(".br\n.in +{indent}n\n{}\n.br\n.in -{indent}n\n", escaped(text)),
        };
        page.extend_from_slice(line.as_bytes());
    }
}

/// Returns the line so that troff prints it unchanged.
fn escaped(line: &str) -> String {
    let line = line.replace('\\', "\\e").replace('-', "\\-");
    if line.starts_with(['.', '\'']) { format!("\\&{line}") } else { line }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_lines_are_escaped_for_troff() {
        assert_eq!(escaped(".fi -x \\"), "\\&.fi \\-x \\e");
    }
}
