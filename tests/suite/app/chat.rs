use crate::common::chat::{ChatTemplate, Message};
use crate::common::report::one_line;

fn render(source: &str, messages: &[Message]) -> Result<String, String> {
    ChatTemplate::new(source, Some("<s>"), Some("</s>"))
        .and_then(|template| template.render(messages, true))
        .map_err(|error| one_line(&error))
}

fn hi() -> Vec<Message> {
    vec![Message::user("Hi")]
}

#[test]
fn blocks_are_trimmed_as_transformers_trims_them() {
    let source = "{% for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m.content }}]\n    {% endif %}\n{% endfor %}\nend";
    assert_eq!(render(source, &hi()).unwrap(), "[Hi]\nend");
}

/// The shapes that the templates of Llama 2 and 3, Qwen 2 and 3, Zephyr and Mistral are made of.
#[test]
fn what_templates_use_is_there() {
    let cases = [
        (
            "{{ bos_token }}{{ messages[0]['content'].strip() }}{{ eos_token }}",
            "<s>Hi</s>",
        ),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{{ messages[-1].content.split('i')[0] }}", "H"),
        (
            "{% for m in messages[::-1] %}{{ loop.index0 }}{{ m.role }}{% endfor %}",
            "0user",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}",
            "1",
        ),
        (
            "{% if tools is defined and tools %}tools{% else %}none{% endif %}",
            "none",
        ),
        (
            "{% if messages[0].content is string %}text{% endif %}",
            "text",
        ),
        (
            "{% if messages[0].content.startswith('H') and not messages[0].content.endswith('H') %}yes{% endif %}",
            "yes",
        ),
        (
            "{{ messages[0] | tojson }}",
            r#"{"role": "user", "content": "Hi"}"#,
        ),
        (
            "{{ {'a': [1, '<é>'], 'b': none} | tojson }}",
            r#"{"a": [1, "<é>"], "b": null}"#,
        ),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        (
            "{% generation %}x{% endgeneration %}{%- generation -%} y {%- endgeneration -%}",
            "xy",
        ),
        ("{% for m in messages %}{% break %}{% endfor %}ok", "ok"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        (
            "{%- macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages | length) }}",
            "<1>",
        ),
        ("{{ 'a' ~ (1 + 1) }}", "a2"),
        (
            "{{ (messages | map(attribute='role') | list)[0] | upper | trim }}",
            "USER",
        ),
    ];
    for (source, wanted) in cases {
        assert_eq!(render(source, &hi()).as_deref(), Ok(wanted), "{source}");
    }
}

#[test]
fn a_conversation_keeps_its_order() {
    let source = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }} {% endfor %}";
    let messages = [
        Message::user("1"),
        Message::assistant("2"),
        Message::user("3"),
    ];
    assert_eq!(render(source, &messages).unwrap(), "u:1 a:2 u:3 ");
}

#[test]
fn what_a_template_refuses_is_said_in_its_own_words() {
    let said = render("{{ raise_exception('roles must\n alternate') }}", &hi()).unwrap_err();
    assert!(said.contains("roles must alternate"), "{said}");
    assert!(
        render("{{ strftime_now('%Q') }}", &hi())
            .unwrap_err()
            .contains("date format")
    );
    assert!(
        render("{% for %}", &hi())
            .unwrap_err()
            .contains("without --chat")
    );
    assert!(
        !render("{{ nothing.at.all }}", &hi())
            .unwrap_err()
            .contains('\n')
    );
}
